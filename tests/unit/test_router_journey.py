"""Journeys over twins: order, failover, cancellation, deadlines."""

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
from router.generation.generation import FailoverConfig, Generation, GenerationContext
from router.generation.output_merger import OutputMerger, coalesce_outputs
from router.generation.output_queue import OutputDeliveryError, OutputQueue
from router.generation.output_validation import find_output_error
from router.generation.record import GenerationRecord

FAST = FailoverConfig(
    placement_seconds=0.5,
    replacement_seconds=0.05,
    retry_pause_seconds=0.001,
    deadlines=TokenTimeouts(first_token=0.05, handoff=0.05, token_gap=0.05),
)
PROMPT = tuple(TokenId(token) for token in (5, 6, 7))


def answer(tokens: Sequence[TokenId], spec: RequestSpec) -> TokenId:
    """Depends on every token before, so that one lost or repeated changes all that follow."""
    return TokenId((sum(tokens) * 31 + len(tokens) * 7) % 251)


def expected(count: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(answer(tokens, SPEC))
    return list(tokens[len(PROMPT) :])


SPEC = RequestSpec(RequestId("r"), Epoch(1), PROMPT, 3, SamplingParams(max_tokens=12))


class Scene:
    """Two prefill and two decode workers, and one journey over them."""

    def __init__(self, *, automatic: bool = True, **changes: Any) -> None:
        names = ("p0", "p1", "d0", "d1")
        self.workers = {n: FakeWorker(n, answer, automatic=automatic) for n in names}
        self.p0, self.p1, self.d0, self.d1 = self.workers.values()
        self.placer = MemoryPlacer([self.p0, self.p1], [self.d0, self.d1])
        self.links = MemoryWorkerConnections(*self.workers.values())
        self.record = GenerationRecord(RequestId("r"), 0.0, len(PROMPT))
        self.spec = replace(SPEC, sampling=replace(SPEC.sampling, **changes))
        self.received: list[RequestOutput] = []
        self._news = asyncio.Event()

    def journey(self, config: FailoverConfig = FAST) -> Generation:
        return self.journey_of(GenerationContext(self.placer, self.links, SystemClock(), config))

    def journey_of(self, guide: GenerationContext) -> Generation:
        chain = BlockKeyHasher(b"root", 2)  # type: ignore[arg-type]
        keys = chain.keys(self.spec.token_ids)
        return Generation(guide, self.spec, TenantId("t"), "m", chain, keys, self.record)

    async def collect(self, config: FailoverConfig = FAST) -> list[int]:
        async for output in self.journey(config).outputs():
            self.received.append(output)
            self._news.set()
        return self.tokens

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.received for token in output.token_ids]

    async def until(self, count: int) -> None:
        while len(self.tokens) < count:
            self._news.clear()
            await self._news.wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_prefill_and_decode_make_one_answer() -> None:
    scene = Scene()
    assert await scene.collect() == expected(12)
    reasons = [output.finish_reason for output in scene.received]
    assert reasons[-1] is FinishReason.LENGTH and not any(reasons[:-1])
    assert [job.task for job in scene.p0.submitted] == [Task.PREFILL]
    assert [job.task for job in scene.d0.submitted] == [Task.DECODE]
    assert scene.d0.submitted[0].source == scene.p0.ref
    assert scene.p0.cancelled == scene.d0.cancelled == []
    assert scene.record.prefill == scene.p0.ref and scene.record.decode == scene.d0.ref


async def test_one_token_needs_no_hand_off() -> None:
    scene = Scene(max_tokens=1)
    assert await scene.collect() == expected(1)
    assert [job.task for job in scene.d0.submitted] == [Task.WHOLE]
    assert scene.p0.submitted == []


async def test_without_a_prefill_worker_the_decode_worker_does_it_all() -> None:
    scene = Scene()
    scene.placer.prefill = []
    assert await scene.collect() == expected(12)
    assert [job.task for job in scene.d0.submitted] == [Task.WHOLE]


async def test_decode_tokens_wait_for_the_first_one() -> None:
    scene = Scene(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    for _ in range(5):
        scene.d0.step()
    await settle()
    assert scene.tokens == []
    scene.p0.step()
    await scene.until(6)
    assert scene.tokens == expected(6)
    for _ in range(6):
        scene.d0.step()
    assert await task == expected(12)


async def test_an_answer_that_ends_with_the_first_token_frees_the_decode_worker() -> None:
    scene = Scene(automatic=False, stop_token_ids=(expected(1)[0],))
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.step()
    assert await task == expected(1)
    assert scene.d0.cancelled == [("r", 1)]


@pytest.mark.parametrize("emitted", [0, 1, 2, 7])
@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_a_killed_worker_loses_and_repeats_nothing(emitted: int, victim: str) -> None:
    scene = Scene(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    if emitted:
        scene.p0.step()
    for _ in range(emitted - 1):
        scene.d0.step()
    await scene.until(emitted)
    scene.workers[victim].kill()
    while not task.done():
        for worker in scene.workers.values():
            worker.step()
        await asyncio.sleep(0)
    assert await task == expected(12)
    second = [w for w in scene.placer.queries if w.epoch == 2]
    if victim == "p0" and emitted:
        assert second == []  # it had done its part
    else:
        assert second[0].excluded == {victim}
        assert second[0].num_tokens == 3 + emitted
        assert len(second[0].block_keys) == (3 + emitted) // 2
    indexes = [o.first_index + i for o in scene.received for i in range(len(o.token_ids))]
    assert indexes == list(range(12))


@pytest.mark.parametrize(
    ("status", "suspects"),
    [
        # Either may have failed during a hand-off, and both links are well.
        ("UNAVAILABLE", {"p0", "d0"}),
        ("DEADLINE_EXCEEDED", {"p0", "d0"}),
        ("DATA_LOSS", {"p0", "d0"}),
        # The source was reborn, or never got the request.
        ("NOT_FOUND", {"p0"}),
    ],
)
async def test_retryable_statuses_go_elsewhere(status: str, suspects: set[str]) -> None:
    scene = Scene(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.d0.fail(status)
    while not task.done():
        for worker in scene.workers.values():
            worker.step()
        await asyncio.sleep(0)
    assert await task == expected(12)
    assert scene.placer.queries[1].excluded == suspects
    assert scene.p0.cancelled == scene.d0.cancelled == [("r", 1)]


async def test_a_bug_in_its_delivery_ends_the_request_at_once() -> None:
    """No other placement would help; the worker is told to let go of it."""
    scene = Scene(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.d0.jobs[0].inbox.put(scene.d0.ref.id, OutputDeliveryError("internal error"))
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
async def test_a_worker_that_lies_is_not_believed(relays: bool, lie: dict[str, Any]) -> None:
    """Another one goes on from the last sound token; the liar gets nothing more for a while, and
    is named."""
    scene = Scene(automatic=False)
    guide = GenerationContext(scene.placer, scene.links, SystemClock(), FAST, vocab_size=256)
    journey = scene.journey_of(guide)

    def relay(output: RequestOutput) -> bool:
        scene.received.append(output)
        return relays

    async def collect() -> None:
        async for output in journey.outputs(relay if relays else None):
            scene.received.append(output)

    task = asyncio.create_task(collect())
    await settle()
    scene.p0.step()
    scene.d0.step()
    await settle()
    [job] = scene.d0.jobs
    told = RequestOutput(RequestId("r"), Epoch(1), 2, (TokenId(1),))
    job.inbox.put(scene.d0.ref.id, replace(told, **lie))
    while not task.done():
        for worker in (scene.p0, scene.p1, scene.d1):
            worker.step()
        await asyncio.sleep(0)
    await task
    assert scene.tokens == expected(12)
    assert [each.placement.decode for each in scene.record.placements] == [
        scene.d0.ref,
        scene.d1.ref,
    ]
    assert scene.record.placements[0].error.startswith("worker d0 sent ")
    assert guide.breakers.open_at(guide.clock.monotonic()) == {"d0"}


async def test_logprobs_are_bounded_by_what_was_asked_for() -> None:
    scene = Scene(logprobs=2, max_tokens=4)
    assert await scene.collect() == expected(4)
    top = ((TokenId(1), -1.0),) * 3
    sound = RequestOutput(RequestId("r"), Epoch(1), 0, (TokenId(1),))
    for entry, flaw in (
        (TokenLogprob(TokenId(1), -1.0, top), "other logprobs than were asked for"),
        (TokenLogprob(TokenId(1), -1.0, ((TokenId(256), -1.0),)), "other logprobs than were"),
        (TokenLogprob(TokenId(1), -1.0, top[:2]), ""),
    ):
        assert find_output_error(replace(sound, logprobs=(entry,)), scene.spec, 256).startswith(
            flaw
        )
    twice = replace(sound, logprobs=(LOGPROB, LOGPROB))
    assert find_output_error(twice, scene.spec, 256) == "2 logprobs of 1 tokens"


@pytest.mark.parametrize("told", ["inf", "nan", "-1", "1e9", "x"])
async def test_how_long_to_wait_is_believed_within_reason(told: str) -> None:
    scene = Scene(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.fail("RESOURCE_EXHAUSTED", retry_after_seconds=told)
    with pytest.raises(Overloaded) as caught:
        await task
    assert to_api_error(caught.value).headers == {"retry-after": "1"}


async def test_a_source_that_was_reborn_is_done_without() -> None:
    """Even where the registry goes on telling of its earlier life, and nobody else reads."""
    scene = Scene(automatic=False)
    scene.placer.prefill, scene.placer.decode = [scene.p0], [scene.d0]
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.d0.fail("NOT_FOUND", "worker p0 was reborn since the request was placed")
    while not task.done():
        scene.d0.step()
        await asyncio.sleep(0)
    assert await task == expected(12)
    assert [p.placement.prefill for p in scene.record.placements] == [scene.p0.ref, None]


async def test_the_last_worker_gets_another_chance() -> None:
    """An error that may be the other's fault excludes nobody when nobody else is there."""
    scene = Scene(automatic=False)
    scene.placer.prefill, scene.placer.decode = [scene.p0], [scene.d0]
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.d0.fail("UNAVAILABLE")
    while not task.done():
        scene.p0.step()
        scene.d0.step()
        await asyncio.sleep(0)
    assert await task == expected(12)
    assert [p.epoch for p in scene.record.placements] == [1, 2]


async def test_a_hand_off_that_fails_between_the_last_two_is_done_without() -> None:
    """The decode worker can't reach its source, and the router can reach both."""
    scene = Scene(automatic=False)
    scene.placer.prefill, scene.placer.decode = [scene.p0], [scene.d0]
    collecting = asyncio.create_task(scene.collect())
    await settle()
    scene.d0.fail("UNAVAILABLE", "connection refused")
    while len(scene.d0.submitted) < 2:
        await asyncio.sleep(0)
    assert scene.d0.submitted[1].task is Task.WHOLE
    while not collecting.done():
        scene.d0.step()
        await asyncio.sleep(0)
    assert await collecting == expected(12)
    assert len(scene.p0.submitted) == 1


async def test_a_dead_last_worker_may_be_reborn() -> None:
    scene = Scene(automatic=False)
    scene.placer.prefill, scene.placer.decode = [], [scene.d0]
    task = asyncio.create_task(scene.collect(replace(FAST, replacement_seconds=2.0)))
    await settle()
    scene.d0.step()
    await scene.until(1)
    scene.d0.kill()
    await asyncio.sleep(0.05)
    assert not task.done()
    reborn = FakeWorker("d0", answer)
    reborn.ref = replace(reborn.ref, generation=Incarnation(2))
    scene.links.workers[reborn.ref.id] = reborn
    scene.placer.decode = [reborn]
    assert await task == expected(12)


@pytest.mark.parametrize("emitted", [1, 2, 7])
async def test_a_draining_worker_hands_its_answer_on(emitted: int) -> None:
    """Whoever goes on reads from it what is known but the last token, which the client has."""
    scene = Scene(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.step()
    for _ in range(emitted - 1):
        scene.d0.step()
    await scene.until(emitted)
    scene.d0.leave(FinishReason.MOVED)
    while not task.done():
        scene.d1.step()
        await asyncio.sleep(0)
    assert await task == expected(12)
    [moved] = scene.d1.submitted
    assert (moved.task, moved.source, moved.spec.epoch) == (Task.DECODE, scene.d0.ref, 2)
    assert list(moved.spec.token_ids) == [*PROMPT, *expected(12)[: emitted - 1]]
    assert len(scene.p0.submitted) == 1 and not scene.p1.submitted
    assert scene.placer.queries[1].excluded == {"d0"}
    assert [p.error for p in scene.record.placements] == ["worker d0 drains", ""]


async def test_moves_are_no_failures() -> None:
    """However many there are, but not without end."""
    scene = Scene(automatic=False)
    task = asyncio.create_task(scene.collect(replace(FAST, max_retries=0)))
    await settle()
    for worker in (scene.p0, scene.d0, scene.p1):
        worker.leave(FinishReason.TURNED_AWAY)
        scene.placer.prefill = [w for w in scene.placer.prefill if w is not worker]
        scene.placer.decode = [w for w in scene.placer.decode if w is not worker]
        await settle()
    while not task.done():
        scene.d1.step()
        await asyncio.sleep(0)
    assert await task == expected(12)
    assert [query.num_tokens for query in scene.placer.queries] == [3, 3, 3, 3]


async def test_nothing_to_go_on_from_is_placed_anew() -> None:
    """What was answered is part of what is computed again when the worker has nothing of it."""
    scene = Scene(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.step()
    scene.d0.step()
    await scene.until(2)
    scene.d0.leave(FinishReason.TURNED_AWAY)
    while not task.done():
        for worker in scene.workers.values():
            worker.step()
        await asyncio.sleep(0)
    assert await task == expected(12)
    assert scene.placer.queries[1].num_tokens == 3 + 2


async def test_a_worker_that_moved_its_answer_and_died_is_recovered_from() -> None:
    scene = Scene(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.step()
    scene.d0.step()
    await scene.until(2)
    scene.d0.leave(FinishReason.MOVED)
    await settle()
    scene.d0.kill()
    scene.d1.fail("NOT_FOUND")
    while not task.done():
        for worker in scene.workers.values():
            worker.step()
        await asyncio.sleep(0)
    assert await task == expected(12)
    assert scene.placer.queries[2].num_tokens == 3 + 2


async def test_who_failed_others_just_now_is_asked_last() -> None:
    scene = Scene()
    scene.links.shuns = frozenset({scene.p0.ref.id, scene.d0.ref.id})
    assert await scene.collect() == expected(12)
    assert scene.p1.submitted and scene.d1.submitted
    scene = Scene()
    scene.links.shuns = frozenset(worker.ref.id for worker in scene.workers.values())
    assert await scene.collect() == expected(12)
    assert scene.placer.queries[1].excluded == frozenset()


async def test_a_last_worker_that_only_lost_its_link_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is registered still, long after it would have left if it were dead."""
    monkeypatch.setattr("router.generation.generation.PRESUMED_DEAD_SECONDS", 0.05)
    scene = Scene(automatic=False)
    scene.placer.prefill, scene.placer.decode = [], [scene.d0]
    task = asyncio.create_task(scene.collect(replace(FAST, replacement_seconds=2.0)))
    await settle()
    scene.d0.step()
    await scene.until(1)
    scene.d0.kill()
    await asyncio.sleep(0.01)
    scene.d0.alive = True
    while not task.done():
        scene.d0.step()
        await asyncio.sleep(0)
    assert await task == expected(12)
    assert [p.epoch for p in scene.record.placements] == [1, 2]


async def test_an_answer_outlives_all_workers() -> None:
    """However many of them: who is not even reached does not count."""
    scene = Scene(automatic=False)
    workers = [FakeWorker(f"w{n}", answer, automatic=False) for n in range(8)]
    scene.links = MemoryWorkerConnections(*workers)
    scene.placer.prefill, scene.placer.decode = [], workers
    task = asyncio.create_task(scene.collect(replace(FAST, replacement_seconds=2.0)))
    await settle()
    workers[0].step()
    await scene.until(1)
    for worker in workers:
        worker.kill()
    while len(scene.record.placements) < len(workers):
        await asyncio.sleep(0.001)
    reborn = FakeWorker("w3", answer)
    reborn.ref = replace(reborn.ref, generation=Incarnation(2))
    scene.links.workers[reborn.ref.id] = reborn
    scene.placer.decode = [reborn]
    assert await task == expected(12)


async def test_workers_that_are_never_reached_are_given_up_in_time() -> None:
    scene = Scene()
    scene.d0.kill()
    scene.placer.prefill, scene.placer.decode = [], [scene.d0]
    with pytest.raises(Unavailable):
        await scene.collect()


async def test_pauses_grow_until_the_registry_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reborn worker fails requests as long as routers know its old life only."""
    pauses: list[float] = []

    async def sleep(self: SystemClock, seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(SystemClock, "sleep", sleep)
    scene = Scene(automatic=False)
    task = asyncio.create_task(scene.collect())
    while not task.done():
        for worker in scene.workers.values():
            worker.fail("NOT_FOUND", "worker p0 was reborn")
        await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="the only workers left"):
        await task
    assert pauses[:4] == [0.001, 0.004, 0.016, 0.016]


async def test_gives_up_after_its_retries() -> None:
    scene = Scene(automatic=False)
    task = asyncio.create_task(scene.collect())
    while not task.done():
        for worker in scene.workers.values():
            worker.fail("UNAVAILABLE", "out of order")
        await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="failed on 4 placements, at last: out of order"):
        await task
    assert [p.epoch for p in scene.record.placements] == [1, 2, 3, 4]
    assert all(p.error == "out of order" for p in scene.record.placements)


@pytest.mark.parametrize(
    ("status", "kind"), [("INVALID_ARGUMENT", Invalid), ("INTERNAL", BatonError)]
)
async def test_fatal_statuses_end_it(status: str, kind: type[BatonError]) -> None:
    scene = Scene(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.fail(status, "no")
    with pytest.raises(kind, match="no"):
        await task
    assert scene.d0.cancelled == [("r", 1)]


async def test_overload_is_told_at_first_and_retried_later() -> None:
    scene = Scene(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.fail("RESOURCE_EXHAUSTED", "full", retry_after_seconds="2.5")
    with pytest.raises(Overloaded) as caught:
        await task
    assert caught.value.retry_after_seconds == 2.5
    scene = Scene(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    scene.p0.step()
    await scene.until(1)
    scene.d0.fail("RESOURCE_EXHAUSTED", "full")
    while not task.done():
        for worker in scene.workers.values():
            worker.step()
        await asyncio.sleep(0)
    assert await task == expected(12)


@pytest.mark.parametrize(
    ("steps", "what"), [(0, "first token"), (1, "hand-off"), (3, "next token")]
)
async def test_every_phase_has_a_deadline(steps: int, what: str) -> None:
    scene = Scene(automatic=False)
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
async def test_cancelling_frees_both_workers(emitted: int) -> None:
    scene = Scene(automatic=False)
    task = asyncio.create_task(scene.collect())
    await settle()
    if emitted:
        scene.p0.step()
    for _ in range(emitted - 1):
        scene.d0.step()
    await scene.until(emitted)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert scene.p0.cancelled == scene.d0.cancelled == [("r", 1)]
    assert scene.p0.jobs == scene.d0.jobs == []


async def test_no_worker_at_all() -> None:
    scene = Scene()
    scene.placer.decode = []
    with pytest.raises(Unavailable, match="no decode worker is ready"):
        await scene.collect()


async def test_a_placer_that_does_not_answer() -> None:
    scene = Scene()

    class Silent(MemoryPlacer):
        async def place(self, query: object) -> Any:
            await asyncio.sleep(60)

    scene.placer = Silent([], [])
    with pytest.raises(DeadlineExceeded, match="no placement within"):
        await scene.collect(replace(FAST, placement_seconds=0.01))


async def test_a_full_inbox_says_so() -> None:
    inbox = OutputQueue(max_unread=2)
    for _ in range(3):
        inbox.put(FakeWorker("w", answer).ref.id, Unavailable("x"))
    with pytest.raises(Overloaded, match="reads too slowly"):
        await inbox.take()


def out(first: int, *tokens: int, epoch: int = 1, end: bool = False) -> RequestOutput:
    reason = FinishReason.LENGTH if end else None
    ids = tuple(TokenId(token) for token in tokens)
    return RequestOutput(RequestId("r"), Epoch(epoch), first, ids, finish_reason=reason)


def merged(outputs: list[RequestOutput], *, base: int = 0, handed_over: bool = True) -> list[int]:
    merge = OutputMerger(Epoch(1), base, handed_over=handed_over)
    return [t for output in outputs for o in merge.add(output) for t in o.token_ids]


def test_outputs_that_wait_together_become_one() -> None:
    one = RequestOutput(RequestId("r"), Epoch(1), 0, (TokenId(7),), details={"transport": "shm"})
    two = RequestOutput(RequestId("r"), Epoch(1), 1, (TokenId(8),))
    told = RequestOutput(RequestId("r"), Epoch(1), 2, (TokenId(9),), details={"bytes_shipped": "1"})
    last = RequestOutput(
        RequestId("r"), Epoch(1), 3, (TokenId(5),), finish_reason=FinishReason.STOP
    )
    first, second = coalesce_outputs([one, two, told, last])
    assert first == replace(one, token_ids=(7, 8))
    assert second == replace(told, token_ids=(9, 5), finish_reason=FinishReason.STOP)


def test_merge_orders_trims_and_drops() -> None:
    assert merged([out(1, 11), out(2, 12, 13), out(0, 10), out(4, 14)]) == [10, 11, 12, 13, 14]
    assert merged([out(0, 10), out(0, 10, 11), out(1, 11, 12)]) == [10, 11, 12]
    assert merged([out(0, 10, epoch=2), out(0, 20)]) == [20]
    assert merged([out(5, 15), out(6, 16)], base=5) == [15, 16]


def test_merge_passes_an_end_without_tokens() -> None:
    merge = OutputMerger(Epoch(1), 0, handed_over=False)
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
def test_merge_notices_gaps(outputs: list[RequestOutput], handed_over: bool) -> None:
    with pytest.raises(Corrupt, match="missing"):
        merged(outputs, handed_over=handed_over)
