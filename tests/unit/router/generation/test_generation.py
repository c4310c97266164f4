"""Tests generations over in-memory workers: token order, failover, cancellation, and deadlines."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.clock import SystemClock
from baton.core.ids import Epoch, Incarnation, RequestId, TenantId, TokenId
from baton.core.request import (
    FinishReason,
    RequestOutput,
    RequestSpec,
    SamplingParams,
    TokenLogprob,
)
from baton.core.task import Task
from baton.core.variant import Variant
from baton.errors import Overloaded, Unavailable
from router.errors import to_api_error
from router.generation.attempt import TokenTimeouts
from router.generation.block_key_hasher import block_key_hasher
from router.generation.generation import Generation
from router.generation.generation_context import FailoverConfig, GenerationContext
from router.generation.output_queue import OutputDeliveryError
from router.generation.output_validation import find_output_error
from router.generation.record import GenerationRecord
from testkit.fakes.workers import FakeWorker, MemoryPlacer, MemoryWorkerConnections

FAST = FailoverConfig(
    placement_timeout_seconds=0.5,
    max_worker_wait_seconds=0.05,
    retry_pause_seconds=0.001,
    timeouts=TokenTimeouts(
        first_token_timeout_seconds=0.05,
        kv_transfer_timeout_seconds=0.05,
        next_token_timeout_seconds=0.05,
    ),
)
PROMPT = tuple(TokenId(token) for token in (5, 6, 7))
VARIANT = Variant("aa", "f32", 2)


def answer(tokens: Sequence[TokenId], spec: RequestSpec) -> TokenId:
    """Return the next token of an answer. It depends on every token before it, so that a lost or
    repeated token changes all later ones."""
    return TokenId((sum(tokens) * 31 + len(tokens) * 7) % 251)


def expected_tokens(count: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(answer(tokens, SPEC))
    return list(tokens[len(PROMPT) :])


SPEC = RequestSpec(RequestId("r"), Epoch(1), PROMPT, 3, SamplingParams(max_tokens=12))


class GenerationHarness:
    """Two prefill and two decode workers, and one generation over them."""

    def __init__(self, *, automatic: bool = True, **changes: Any) -> None:
        names = ("p0", "p1", "d0", "d1")
        self.workers = {n: FakeWorker(n, answer, automatic=automatic) for n in names}
        self.p0, self.p1, self.d0, self.d1 = self.workers.values()
        self.placer = MemoryPlacer([self.p0, self.p1], [self.d0, self.d1])
        self.links = MemoryWorkerConnections(*self.workers.values())
        self.record = GenerationRecord(RequestId("r"), 0.0, len(PROMPT))
        self.spec = replace(SPEC, sampling=replace(SPEC.sampling, **changes))
        self.received: list[RequestOutput] = []
        self._received_event = asyncio.Event()

    def generation(self, config: FailoverConfig = FAST) -> Generation:
        return self.generation_in(GenerationContext(self.placer, self.links, SystemClock(), config))

    def generation_in(self, context: GenerationContext) -> Generation:
        keys = block_key_hasher(VARIANT, b"").compute_keys(self.spec.token_ids)
        return Generation(context, self.spec, TenantId("t"), "m", VARIANT, keys, self.record)

    async def collect(self, config: FailoverConfig = FAST) -> list[int]:
        async for output in self.generation(config).outputs():
            self.received.append(output)
            self._received_event.set()
        return self.tokens

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.received for token in output.token_ids]

    async def wait_for_tokens(self, count: int) -> None:
        while len(self.tokens) < count:
            self._received_event.clear()
            await self._received_event.wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_prefill_and_decode_workers_produce_one_answer() -> None:
    scene = GenerationHarness()
    assert await scene.collect() == expected_tokens(12)
    reasons = [output.finish_reason for output in scene.received]
    assert reasons[-1] is FinishReason.LENGTH and not any(reasons[:-1])
    assert [job.task for job in scene.p0.submitted] == [Task.PREFILL]
    assert [job.task for job in scene.d0.submitted] == [Task.DECODE]
    assert scene.d0.submitted[0].source == scene.p0.ref
    assert scene.p0.cancelled == scene.d0.cancelled == []
    assert scene.record.prefill == scene.p0.ref and scene.record.decode == scene.d0.ref


async def test_answer_of_one_token_is_computed_by_the_prefill_worker() -> None:
    """Also if the placement has a decode worker, as from a conductor of the previous version."""
    scene = GenerationHarness(max_tokens=1)
    assert await scene.collect() == expected_tokens(1)
    assert [job.task for job in scene.p0.submitted] == [Task.PREFILL]
    assert [request_id for request_id, _ in scene.d0.cancelled] == [scene.record.request_id]


async def test_without_a_prefill_worker_the_decode_worker_runs_the_whole_request() -> None:
    scene = GenerationHarness()
    scene.placer.prefill = []
    assert await scene.collect() == expected_tokens(12)
    assert [job.task for job in scene.d0.submitted] == [Task.PREFILL_AND_DECODE]


async def test_decode_tokens_wait_for_the_first_token() -> None:
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    for _ in range(5):
        scene.d0.step()
    await settle()
    assert scene.tokens == []
    scene.p0.step()
    await scene.wait_for_tokens(6)
    assert scene.tokens == expected_tokens(6)
    for _ in range(6):
        scene.d0.step()
    assert await task == expected_tokens(12)


async def test_answer_that_ends_with_its_first_token_frees_the_decode_worker() -> None:
    scene = GenerationHarness(automatic=False, stop_token_ids=(expected_tokens(1)[0],))
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.step()
    assert await task == expected_tokens(1)
    assert scene.d0.cancelled == [("r", 1)]


@pytest.mark.parametrize("emitted", [0, 1, 2, 7])
@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_killed_worker_loses_and_repeats_no_tokens(emitted: int, victim: str) -> None:
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    if emitted:
        scene.p0.step()
    for _ in range(emitted - 1):
        scene.d0.step()
    await scene.wait_for_tokens(emitted)
    scene.workers[victim].kill()
    while not task.done():
        for worker in scene.workers.values():
            worker.step()
        await asyncio.sleep(0)
    assert await task == expected_tokens(12)
    second = [w for w in scene.placer.queries if w.epoch == 2]
    if victim == "p0" and emitted:
        assert second == []  # the prefill worker had finished its part
    else:
        assert second[0].excluded == {victim}
        assert second[0].num_tokens == 3 + emitted
        assert len(second[0].block_keys) == (3 + emitted) // 2
    indexes = [o.first_index + i for o in scene.received for i in range(len(o.token_ids))]
    assert indexes == list(range(12))


@pytest.mark.parametrize(
    ("status", "suspects"),
    [
        # Either worker may have failed during the KV transfer, since the connections to both work.
        ("UNAVAILABLE", {"p0", "d0"}),
        ("DEADLINE_EXCEEDED", {"p0", "d0"}),
        ("DATA_LOSS", {"p0", "d0"}),
        # The source was restarted, or never got the request.
        ("NOT_FOUND", {"p0"}),
    ],
)
async def test_retryable_statuses_are_retried_on_other_workers(
    status: str, suspects: set[str]
) -> None:
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.d0.fail_jobs(status)
    while not task.done():
        for worker in scene.workers.values():
            worker.step()
        await asyncio.sleep(0)
    assert await task == expected_tokens(12)
    assert scene.placer.queries[1].excluded == suspects
    assert scene.p0.cancelled == scene.d0.cancelled == [("r", 1)]


async def test_output_delivery_error_ends_the_request_at_once() -> None:
    """No other placement would help, so the request fails, and both workers are told to cancel
    it."""
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.d0.jobs[0].receive(scene.d0.ref.id, OutputDeliveryError("internal error"))
    with pytest.raises(OutputDeliveryError):
        await task
    assert len(scene.placer.queries) == 1
    assert scene.d0.cancelled == scene.p0.cancelled == [("r", 1)]


LOGPROB = TokenLogprob(TokenId(1), -1.0)


@pytest.mark.parametrize(
    ("relays", "lie"),
    [
        (True, {"token_ids": (TokenId(256),)}),
        (True, {"token_ids": ()}),
        (True, {"token_ids": (TokenId(1),) * 12}),
        (True, {"details": {"d": "x" * 20_000}}),
        (False, {"token_ids": (TokenId(256),)}),
        (False, {"token_ids": (TokenId(-1),)}),
        (False, {"logprobs": (LOGPROB,)}),
        (False, {"prompt_logprobs": (LOGPROB,) * 2}),
    ],
)
async def test_invalid_worker_outputs_are_rejected(relays: bool, lie: dict[str, Any]) -> None:
    """Another worker continues the answer from the last valid token. The worker that sent the
    invalid output gets no requests for a while, and the request's record names it."""
    scene = GenerationHarness(automatic=False)
    context = GenerationContext(scene.placer, scene.links, SystemClock(), FAST, vocab_size=256)
    generation = scene.generation_in(context)

    def relay(output: RequestOutput) -> bool:
        scene.received.append(output)
        return relays

    async def collect() -> None:
        async for output in generation.outputs(relay if relays else None):
            scene.received.append(output)

    task = asyncio.create_task(collect())
    await settle()
    scene.p0.step()
    scene.d0.step()
    await settle()
    [job] = scene.d0.jobs
    reported = RequestOutput(RequestId("r"), Epoch(1), 2, (TokenId(1),))
    job.receive(scene.d0.ref.id, replace(reported, **lie))
    while not task.done():
        for worker in (scene.p0, scene.p1, scene.d1):
            worker.step()
        await asyncio.sleep(0)
    await task
    assert scene.tokens == expected_tokens(12)
    assert [each.placement.decode for each in scene.record.placements] == [
        scene.d0.ref,
        scene.d1.ref,
    ]
    assert scene.record.placements[0].error.startswith("worker d0 sent ")
    assert context.breakers.open_workers(context.clock.monotonic()) == {"d0"}


async def test_outputs_may_have_no_more_logprobs_than_requested() -> None:
    scene = GenerationHarness(logprobs=2, max_tokens=4)
    assert await scene.collect() == expected_tokens(4)
    top = ((TokenId(1), -1.0),) * 3
    sound = RequestOutput(RequestId("r"), Epoch(1), 0, (TokenId(1),))
    for entry, flaw in (
        (TokenLogprob(TokenId(1), -1.0, top), "logprobs that differ from those requested"),
        (TokenLogprob(TokenId(1), -1.0, ((TokenId(256), -1.0),)), "logprobs that differ"),
        (TokenLogprob(TokenId(1), -1.0, top[:2]), ""),
    ):
        assert find_output_error(replace(sound, logprobs=(entry,)), scene.spec, 256).startswith(
            flaw
        )
    twice = replace(sound, logprobs=(LOGPROB, LOGPROB))
    assert find_output_error(twice, scene.spec, 256) == "2 logprobs for 1 tokens"


@pytest.mark.parametrize("reported", ["inf", "nan", "-1", "1e9", "x"])
async def test_absurd_retry_after_of_a_worker_becomes_one_second(reported: str) -> None:
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.fail_jobs("RESOURCE_EXHAUSTED", retry_after_seconds=reported)
    with pytest.raises(Overloaded) as caught:
        await task
    headers = {"retry-after": "1", "retry-after-ms": "1000"}
    assert to_api_error(caught.value).headers == headers


async def test_restarted_source_is_dropped_from_the_placement() -> None:
    """The prefill worker, from which the KV was to come, has restarted and lost the KV. The
    registry still lists the worker's previous incarnation. The next placement must not use that
    incarnation, although there is no other prefill worker."""
    scene = GenerationHarness(automatic=False)
    scene.placer.prefill, scene.placer.decode = [scene.p0], [scene.d0]
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.d0.fail_jobs("NOT_FOUND", "worker p0 was reborn since the request was placed")
    while not task.done():
        scene.d0.step()
        await asyncio.sleep(0)
    assert await task == expected_tokens(12)
    assert [p.placement.prefill for p in scene.record.placements] == [scene.p0.ref, None]


async def test_last_remaining_worker_is_retried() -> None:
    """The decode worker's error may be the prefill worker's fault, so both are excluded at first.
    As there are no other workers, the decode worker is allowed again, and computes the prompt
    itself, so that no KV transfer is needed."""
    scene = GenerationHarness(automatic=False)
    scene.placer.prefill, scene.placer.decode = [scene.p0], [scene.d0]
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.d0.fail_jobs("UNAVAILABLE")
    while not task.done():
        scene.p0.step()
        scene.d0.step()
        await asyncio.sleep(0)
    assert await task == expected_tokens(12)
    assert [p.epoch for p in scene.record.placements] == [1, 2]


async def test_failed_kv_transfer_between_the_last_two_workers_falls_back_to_one() -> None:
    """The router can reach both workers, but the decode worker can't reach the prefill worker. So
    the decode worker computes the prompt itself."""
    scene = GenerationHarness(automatic=False)
    scene.placer.prefill, scene.placer.decode = [scene.p0], [scene.d0]
    collecting = asyncio.create_task(scene.collect())
    await settle()
    scene.d0.fail_jobs("UNAVAILABLE", "connection refused")
    while len(scene.d0.submitted) < 2:
        await asyncio.sleep(0)
    assert scene.d0.submitted[1].task is Task.PREFILL_AND_DECODE
    while not collecting.done():
        scene.d0.step()
        await asyncio.sleep(0)
    assert await collecting == expected_tokens(12)
    assert len(scene.p0.submitted) == 1


async def test_last_worker_may_be_restarted() -> None:
    scene = GenerationHarness(automatic=False)
    scene.placer.prefill, scene.placer.decode = [], [scene.d0]
    task = asyncio.create_task(scene.collect(replace(FAST, max_worker_wait_seconds=2.0)))
    await settle()
    scene.d0.step()
    await scene.wait_for_tokens(1)
    scene.d0.kill()
    await asyncio.sleep(0.05)
    assert not task.done()
    reborn = FakeWorker("d0", answer)
    reborn.ref = replace(reborn.ref, generation=Incarnation(2))
    scene.links.workers[reborn.ref.id] = reborn
    scene.placer.decode = [reborn]
    assert await task == expected_tokens(12)


@pytest.mark.parametrize("is_expected", [True, False])
async def test_a_new_request_waits_only_for_an_expected_worker(is_expected: bool) -> None:
    """While no worker is ready, one may be starting, or its server may be frozen."""
    scene = GenerationHarness()
    scene.placer.prefill, scene.placer.decode = [], []
    config = replace(FAST, max_worker_wait_seconds=30.0)
    context = GenerationContext(
        scene.placer, scene.links, SystemClock(), config, expects_workers=lambda: is_expected
    )
    outputs = scene.generation_in(context).outputs()
    first = asyncio.create_task(anext(outputs))
    while not scene.placer.queries:
        await asyncio.sleep(0)
    if is_expected:
        scene.placer.decode = [scene.d0]
        received = [await first] + [output async for output in outputs]
        assert [t for each in received for t in each.token_ids] == expected_tokens(12)
        assert [p.epoch for p in scene.record.placements] == [1]
    else:
        with pytest.raises(Unavailable):
            await first


async def test_a_request_stops_waiting_when_no_worker_is_expected_any_more() -> None:
    scene = GenerationHarness()
    scene.placer.prefill, scene.placer.decode = [], []
    config = replace(FAST, max_worker_wait_seconds=30.0)
    expected = iter([True, True, False])
    context = GenerationContext(
        scene.placer, scene.links, SystemClock(), config, expects_workers=lambda: next(expected)
    )
    with pytest.raises(Unavailable):
        await anext(scene.generation_in(context).outputs())
    assert not list(expected)


async def test_workers_that_just_failed_others_are_used_last() -> None:
    scene = GenerationHarness()
    scene.links.avoided = frozenset({scene.p0.ref.id, scene.d0.ref.id})
    assert await scene.collect() == expected_tokens(12)
    assert scene.p1.submitted and scene.d1.submitted
    scene = GenerationHarness()
    scene.links.avoided = frozenset(worker.ref.id for worker in scene.workers.values())
    assert await scene.collect() == expected_tokens(12)
    assert scene.placer.queries[1].excluded == frozenset()


async def test_last_worker_that_only_lost_its_connection_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker is still registered PRESUMED_DEAD_SECONDS after its connection broke. If it were
    dead, its registry entry would have expired by then."""
    monkeypatch.setattr("router.generation.placement_search.PRESUMED_DEAD_SECONDS", 0.05)
    scene = GenerationHarness(automatic=False)
    scene.placer.prefill, scene.placer.decode = [], [scene.d0]
    task = asyncio.create_task(scene.collect(replace(FAST, max_worker_wait_seconds=2.0)))
    await settle()
    scene.d0.step()
    await scene.wait_for_tokens(1)
    scene.d0.kill()
    await asyncio.sleep(0.01)
    scene.d0.is_alive = True
    while not task.done():
        scene.d0.step()
        await asyncio.sleep(0)
    assert await task == expected_tokens(12)
    assert [p.epoch for p in scene.record.placements] == [1, 2]


async def test_answer_survives_the_death_of_all_workers() -> None:
    """An answer survives the death of any number of workers, since an attempt on an unreachable
    worker does not count as a retry."""
    scene = GenerationHarness(automatic=False)
    workers = [FakeWorker(f"w{n}", answer, automatic=False) for n in range(8)]
    scene.links = MemoryWorkerConnections(*workers)
    scene.placer.prefill, scene.placer.decode = [], workers
    task = asyncio.create_task(scene.collect(replace(FAST, max_worker_wait_seconds=2.0)))
    await settle()
    workers[0].step()
    await scene.wait_for_tokens(1)
    for worker in workers:
        worker.kill()
    while len(scene.record.placements) < len(workers):
        await asyncio.sleep(0.001)
    reborn = FakeWorker("w3", answer)
    reborn.ref = replace(reborn.ref, generation=Incarnation(2))
    scene.links.workers[reborn.ref.id] = reborn
    scene.placer.decode = [reborn]
    assert await task == expected_tokens(12)
