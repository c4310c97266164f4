"""Workers that change their role: what runs goes on, what they know stays."""

from dataclasses import replace

from baton.core.ids import Epoch
from baton.core.request import FinishReason, RequestOutput
from baton.core.states import Role, WorkerState
from baton.core.task import Task
from baton.engine.fake_runner import reference_answer
from baton.worker.worker import WorkerConfig
from tests.sim.worker_cluster import (
    Cluster,
    Node,
    cluster,
    collect,
    is_finished,
    request,
    tokens_of,
)

PROMPT = list(range(1, 41))


async def over_both(prefill: Node, decode: Node, name: str) -> list[RequestOutput]:
    spec = request(name, PROMPT, 12)
    first, rest = prefill.worker.open_stream(), decode.worker.open_stream()
    first.submit(spec, Task.PREFILL, None)
    rest.submit(spec, Task.DECODE, prefill.ref)
    outputs = await collect(first, bool) + await collect(rest, is_finished)
    assert tokens_of(outputs) == reference_answer(spec)[0]
    return outputs


async def swap(running: Cluster) -> None:
    running.decode.worker.convert(Role.PREFILL)
    running.prefill.worker.convert(Role.DECODE)
    await running.decode.wait_until_ready()
    await running.prefill.wait_until_ready()


async def test_both_change_and_know_what_they_knew() -> None:
    async with cluster() as running:
        prefill, decode = running.prefill, running.decode
        before = await over_both(prefill, decode, "a")
        await swap(running)
        assert (prefill.worker.role, decode.worker.role) == (Role.DECODE, Role.PREFILL)
        after = await over_both(decode, prefill, "b")
        await prefill.wait_until_free()
        await decode.wait_until_free()
    # All whole blocks of the prompt but the last, whose last token is computed.
    assert (before[0].cached_tokens, after[0].cached_tokens) == (0, 36)


async def test_a_running_answer_goes_on_elsewhere_and_then_the_role_changes() -> None:
    spec = request("r", PROMPT, 150)
    async with cluster(config=WorkerConfig(finish_seconds=0.0)) as running:
        source, heir = running.decode, running.prefill
        gate = source.runner.close_after(8)
        stream, other = source.worker.open_stream(), heir.worker.open_stream()
        stream.submit(spec, Task.WHOLE, None)
        outputs = await collect(stream, lambda outputs: len(outputs) >= 2)
        source.worker.convert(Role.PREFILL)
        late = source.worker.open_stream()
        late.submit(request("late", PROMPT, 8), Task.WHOLE, None)
        assert (await collect(late, bool))[0].finish_reason is FinishReason.TURNED_AWAY
        await gate.open_slowly(stream, outputs)
        assert outputs.pop().finish_reason is FinishReason.MOVED
        # What is held for its reader is not left behind.
        assert (source.worker.role, source.worker.state) == (Role.DECODE, WorkerState.DRAINING)
        known = tokens_of(outputs)
        going_on = replace(spec, epoch=Epoch(2), token_ids=spec.token_ids + known[:-1])
        other.submit(going_on, Task.DECODE, source.ref)
        rest = await collect(other, is_finished)
        await source.wait_until_ready()
        assert source.worker.role is Role.PREFILL
        await source.wait_until_free()
        await heir.wait_until_free()
        await over_both(source, heir, "next")
    assert tokens_of([*outputs, *rest]) == reference_answer(spec)[0]


async def test_one_that_is_called_back_goes_on_with_what_it_has() -> None:
    spec = request("r", PROMPT, 20)
    async with cluster() as running:
        node = running.decode
        gate = node.runner.close_after(6)
        stream = node.worker.open_stream()
        stream.submit(spec, Task.WHOLE, None)
        outputs = await collect(stream, bool)
        node.worker.convert(Role.PREFILL)
        node.worker.convert(Role.DECODE)
        assert (node.worker.role, node.worker.state) == (Role.DECODE, WorkerState.READY)
        await gate.open_slowly(stream, outputs)
        await node.wait_until_free()
    assert tokens_of(outputs) == reference_answer(spec)[0]
