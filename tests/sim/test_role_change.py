"""Tests that when workers change their roles, running requests continue and the prefix cache is
kept."""

from dataclasses import replace

from baton.core.ids import Epoch
from baton.core.request import FinishReason, RequestOutput
from baton.core.states import Role, WorkerState
from baton.core.task import Task
from baton.worker.context import WorkerConfig
from testkit.fakes.runner import reference_answer
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


async def run_over_both(prefill: Node, decode: Node, name: str) -> list[RequestOutput]:
    """Prefill one request on ``prefill``, decode it on ``decode``, and check its tokens. Return its
    outputs."""
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


async def test_workers_that_swap_roles_keep_their_prefix_cache() -> None:
    async with cluster() as running:
        prefill, decode = running.prefill, running.decode
        before = await run_over_both(prefill, decode, "a")
        await swap(running)
        assert (prefill.worker.role, decode.worker.role) == (Role.DECODE, Role.PREFILL)
        after = await run_over_both(decode, prefill, "b")
        await prefill.wait_until_free()
        await decode.wait_until_free()
    # Every block of the prompt is a cache hit except the last one, whose last token is always
    # computed.
    assert (before[0].cached_tokens, after[0].cached_tokens) == (0, 36)


async def test_a_role_change_migrates_running_requests_first() -> None:
    spec = request("r", PROMPT, 150)
    async with cluster(config=WorkerConfig(drain_grace_seconds=0.0)) as running:
        source, target = running.decode, running.prefill
        gate = source.runner.close_after(8)
        stream, other = source.worker.open_stream(), target.worker.open_stream()
        stream.submit(spec, Task.PREFILL_AND_DECODE, None)
        outputs = await collect(stream, lambda outputs: len(outputs) >= 2)
        source.worker.convert(Role.PREFILL)
        late = source.worker.open_stream()
        late.submit(request("late", PROMPT, 8), Task.PREFILL_AND_DECODE, None)
        assert (await collect(late, bool))[0].finish_reason is FinishReason.REROUTED
        await gate.open_slowly(stream, outputs)
        assert outputs.pop().finish_reason is FinishReason.MIGRATED
        # The role does not change while KV is still exported for the target.
        assert (source.worker.role, source.worker.state) == (Role.DECODE, WorkerState.DRAINING)
        generated = tokens_of(outputs)
        continued = replace(spec, epoch=Epoch(2), token_ids=spec.token_ids + generated[:-1])
        other.submit(continued, Task.DECODE, source.ref)
        rest = await collect(other, is_finished)
        await source.wait_until_ready()
        assert source.worker.role is Role.PREFILL
        await source.wait_until_free()
        await target.wait_until_free()
        await run_over_both(source, target, "next")
    assert tokens_of([*outputs, *rest]) == reference_answer(spec)[0]


async def test_a_revoked_role_change_keeps_running_requests() -> None:
    spec = request("r", PROMPT, 20)
    async with cluster() as running:
        node = running.decode
        gate = node.runner.close_after(6)
        stream = node.worker.open_stream()
        stream.submit(spec, Task.PREFILL_AND_DECODE, None)
        outputs = await collect(stream, bool)
        node.worker.convert(Role.PREFILL)
        node.worker.convert(Role.DECODE)
        assert (node.worker.role, node.worker.state) == (Role.DECODE, WorkerState.READY)
        await gate.open_slowly(stream, outputs)
        await node.wait_until_free()
    assert tokens_of(outputs) == reference_answer(spec)[0]
