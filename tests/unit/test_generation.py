"""Generations over in-memory workers: token order, failover, cancellation, deadlines."""

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
from baton.errors import BatonError, Corrupt, DeadlineExceeded, Invalid, Overloaded, Unavailable
from router.errors import to_api_error
from router.generation.attempt import TokenTimeouts
from router.generation.block_key_hasher import BlockKeyHasher
from router.generation.fakes import FakeWorker, MemoryPlacer, MemoryWorkerConnections
from router.generation.generation import Generation
from router.generation.generation_context import FailoverConfig, GenerationContext
from router.generation.output_merger import OutputMerger, coalesce_outputs
from router.generation.output_queue import OutputDeliveryError, OutputQueue
from router.generation.output_validation import find_output_error
from router.generation.record import GenerationRecord

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


def answer(tokens: Sequence[TokenId], spec: RequestSpec) -> TokenId:
    """Return a token that depends on every token before it, so that a lost or repeated token
    changes all that follow."""
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
        chain = BlockKeyHasher(b"root", 2)  # type: ignore[arg-type]
        keys = chain.compute_keys(self.spec.token_ids)
        return Generation(context, self.spec, TenantId("t"), "m", chain, keys, self.record)

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


async def test_single_token_answer_needs_no_kv_transfer() -> None:
    scene = GenerationHarness(max_tokens=1)
    assert await scene.collect() == expected_tokens(1)
    assert [job.task for job in scene.d0.submitted] == [Task.PREFILL_AND_DECODE]
    assert scene.p0.submitted == []


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
        # Either worker may have failed during the KV transfer; the connections to both work.
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
    """No other placement would help, so that only the workers are told to cancel the request."""
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
    """Another worker continues from the last valid token. The faulty one gets no requests for a
    while, and the record names it."""
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
    assert to_api_error(caught.value).headers == {"retry-after": "1"}


async def test_restarted_source_is_dropped_from_the_placement() -> None:
    """This holds even if the registry still reports its earlier incarnation, and there is no
    other prefill worker."""
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
    """An error that may be the other worker's fault excludes none if there are no alternatives."""
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
    """The decode worker can't reach its source, but the router can reach both."""
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


@pytest.mark.parametrize("emitted", [1, 2, 7])
async def test_draining_worker_migrates_its_answer(emitted: int) -> None:
    """The next worker imports the KV of all known tokens except the last one, which the client
    already has."""
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.step()
    for _ in range(emitted - 1):
        scene.d0.step()
    await scene.wait_for_tokens(emitted)
    scene.d0.drain(FinishReason.MIGRATED)
    while not task.done():
        scene.d1.step()
        await asyncio.sleep(0)
    assert await task == expected_tokens(12)
    [moved] = scene.d1.submitted
    assert (moved.task, moved.source, moved.spec.epoch) == (Task.DECODE, scene.d0.ref, 2)
    assert list(moved.spec.token_ids) == [*PROMPT, *expected_tokens(12)[: emitted - 1]]
    assert len(scene.p0.submitted) == 1 and not scene.p1.submitted
    assert scene.placer.queries[1].excluded == {"d0"}
    assert [p.error for p in scene.record.placements] == ["worker d0 is draining", ""]


async def test_migrations_do_not_count_as_failures() -> None:
    """Their number may exceed the retries, although it is bounded."""
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect(replace(FAST, max_retries=0)))
    await settle()
    for worker in (scene.p0, scene.d0, scene.p1):
        worker.drain(FinishReason.REROUTED)
        scene.placer.prefill = [w for w in scene.placer.prefill if w is not worker]
        scene.placer.decode = [w for w in scene.placer.decode if w is not worker]
        await settle()
    while not task.done():
        scene.d1.step()
        await asyncio.sleep(0)
    assert await task == expected_tokens(12)
    assert [query.num_tokens for query in scene.placer.queries] == [3, 3, 3, 3]


async def test_turned_away_answer_is_recomputed_elsewhere() -> None:
    """If the worker has no KV of the answer, the generated tokens are part of the new prefill."""
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.step()
    scene.d0.step()
    await scene.wait_for_tokens(2)
    scene.d0.drain(FinishReason.REROUTED)
    while not task.done():
        for worker in scene.workers.values():
            worker.step()
        await asyncio.sleep(0)
    assert await task == expected_tokens(12)
    assert scene.placer.queries[1].num_tokens == 3 + 2


async def test_source_that_dies_during_a_migration_is_recovered_from() -> None:
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.step()
    scene.d0.step()
    await scene.wait_for_tokens(2)
    scene.d0.drain(FinishReason.MIGRATED)
    await settle()
    scene.d0.kill()
    scene.d1.fail_jobs("NOT_FOUND")
    while not task.done():
        for worker in scene.workers.values():
            worker.step()
        await asyncio.sleep(0)
    assert await task == expected_tokens(12)
    assert scene.placer.queries[2].num_tokens == 3 + 2


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
    """It is still registered, long after it would have expired if it was dead."""
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
    """The number of workers does not matter: one that can't be reached does not count as a
    retry."""
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


async def test_request_fails_in_time_if_no_worker_is_reachable() -> None:
    scene = GenerationHarness()
    scene.d0.kill()
    scene.placer.prefill, scene.placer.decode = [], [scene.d0]
    with pytest.raises(Unavailable):
        await scene.collect()


async def test_retry_pauses_grow_until_the_registry_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restarted worker fails requests as long as routers know only its old incarnation."""
    pauses: list[float] = []

    async def sleep(self: SystemClock, seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(SystemClock, "sleep", sleep)
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect())
    while not task.done():
        for worker in scene.workers.values():
            worker.fail_jobs("NOT_FOUND", "worker p0 was reborn")
        await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="the only workers left"):
        await task
    assert pauses[:4] == [0.001, 0.004, 0.016, 0.016]


async def test_generation_fails_after_its_retries() -> None:
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect())
    while not task.done():
        for worker in scene.workers.values():
            worker.fail_jobs("UNAVAILABLE", "out of order")
        await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="failed on 4 placements; the last failure: out of order"):
        await task
    assert [p.epoch for p in scene.record.placements] == [1, 2, 3, 4]
    assert all(p.error == "out of order" for p in scene.record.placements)


@pytest.mark.parametrize(
    ("status", "kind"), [("INVALID_ARGUMENT", Invalid), ("INTERNAL", BatonError)]
)
async def test_fatal_statuses_end_the_generation(status: str, kind: type[BatonError]) -> None:
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.fail_jobs(status, "no")
    with pytest.raises(kind, match="no"):
        await task
    assert scene.d0.cancelled == [("r", 1)]


async def test_overload_is_reported_before_the_first_token_and_retried_after_it() -> None:
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.fail_jobs("RESOURCE_EXHAUSTED", "full", retry_after_seconds="2.5")
    with pytest.raises(Overloaded) as caught:
        await task
    assert caught.value.retry_after_seconds == 2.5
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.step()
    await scene.wait_for_tokens(1)
    scene.d0.fail_jobs("RESOURCE_EXHAUSTED", "full")
    while not task.done():
        for worker in scene.workers.values():
            worker.step()
        await asyncio.sleep(0)
    assert await task == expected_tokens(12)


@pytest.mark.parametrize(
    ("steps", "what"), [(0, "first token"), (1, "KV transfer"), (3, "next token")]
)
async def test_every_phase_has_a_deadline(steps: int, what: str) -> None:
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect(replace(FAST, max_retries=0)))
    await settle()
    if steps:
        scene.p0.step()
    for _ in range(steps - 1):
        scene.d0.step()
    with pytest.raises(DeadlineExceeded, match=f"the {what} did not come in time"):
        await task
    assert ("r", 1) in scene.d0.cancelled


@pytest.mark.parametrize("emitted", [0, 1, 4])
async def test_cancelled_generation_frees_both_workers(emitted: int) -> None:
    scene = GenerationHarness(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    if emitted:
        scene.p0.step()
    for _ in range(emitted - 1):
        scene.d0.step()
    await scene.wait_for_tokens(emitted)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert scene.p0.cancelled == scene.d0.cancelled == [("r", 1)]
    assert scene.p0.jobs == scene.d0.jobs == []


async def test_generation_without_workers_fails() -> None:
    scene = GenerationHarness()
    scene.placer.decode = []
    with pytest.raises(Unavailable, match="no decode worker is ready"):
        await scene.collect()


async def test_silent_placer_times_out() -> None:
    scene = GenerationHarness()

    class Silent(MemoryPlacer):
        async def place(self, query: object) -> Any:
            await asyncio.sleep(60)

    scene.placer = Silent([], [])
    with pytest.raises(DeadlineExceeded, match="no placement within"):
        await scene.collect(replace(FAST, placement_timeout_seconds=0.01))


async def test_full_output_queue_raises_overloaded() -> None:
    inbox = OutputQueue(max_unread=2)
    for _ in range(3):
        inbox.put(FakeWorker("w", answer).ref.id, Unavailable("x"))
    with pytest.raises(Overloaded, match="reads too slowly"):
        await inbox.get_all()


def out(first: int, *tokens: int, epoch: int = 1, end: bool = False) -> RequestOutput:
    reason = FinishReason.LENGTH if end else None
    ids = tuple(TokenId(token) for token in tokens)
    return RequestOutput(RequestId("r"), Epoch(epoch), first, ids, finish_reason=reason)


def merged(outputs: list[RequestOutput], *, base: int = 0, handed_over: bool = True) -> list[int]:
    merge = OutputMerger(Epoch(1), base, is_split=handed_over)
    return [t for output in outputs for o in merge.add(output) for t in o.token_ids]


def test_waiting_outputs_are_coalesced() -> None:
    one = RequestOutput(RequestId("r"), Epoch(1), 0, (TokenId(7),), details={"transport": "shm"})
    two = RequestOutput(RequestId("r"), Epoch(1), 1, (TokenId(8),))
    details = {"bytes_shipped": "1"}
    reported = RequestOutput(RequestId("r"), Epoch(1), 2, (TokenId(9),), details=details)
    last = RequestOutput(
        RequestId("r"), Epoch(1), 3, (TokenId(5),), finish_reason=FinishReason.STOP
    )
    first, second = coalesce_outputs([one, two, reported, last])
    assert first == replace(one, token_ids=(7, 8))
    assert second == replace(reported, token_ids=(9, 5), finish_reason=FinishReason.STOP)


def test_merger_orders_trims_and_drops_outputs() -> None:
    assert merged([out(1, 11), out(2, 12, 13), out(0, 10), out(4, 14)]) == [10, 11, 12, 13, 14]
    assert merged([out(0, 10), out(0, 10, 11), out(1, 11, 12)]) == [10, 11, 12]
    assert merged([out(0, 10, epoch=2), out(0, 20)]) == [20]
    assert merged([out(5, 15), out(6, 16)], base=5) == [15, 16]


def test_merger_passes_a_final_output_without_tokens() -> None:
    merge = OutputMerger(Epoch(1), 0, is_split=False)
    assert len(list(merge.add(out(0, 10)))) == 1
    assert [o.finish_reason for o in merge.add(out(1, end=True))] == [FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("outputs", "handed_over"),
    [
        ([out(1, 11)], False),
        ([out(2, 12)], True),
        ([out(1, 11), out(3, 13)], True),
        ([out(0, 10), out(2, 12)], True),
    ],
)
def test_merger_detects_gaps(outputs: list[RequestOutput], handed_over: bool) -> None:
    with pytest.raises(Corrupt, match="missing"):
        merged(outputs, handed_over=handed_over)
