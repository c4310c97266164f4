"""Tests a generation's limits: retries, deadlines, cancellation, full queues, and no workers at
all."""

import asyncio
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from baton.clock import SystemClock
from baton.core.ids import Epoch, RequestId, TokenId, WorkerId
from baton.core.request import RequestOutput, TokenLogprob
from baton.errors import BatonError, DeadlineExceeded, Invalid, Overloaded, Unavailable
from router.generation.output_queue import OutputQueue
from router.limits import PACKED_OUTPUTS
from testkit.fakes.workers import FakeWorker, MemoryPlacer
from tests.sim.virtual_time import simulate
from tests.unit.router.generation.test_generation import (
    FAST,
    GenerationHarness,
    answer,
    expected_tokens,
    settle,
)

SCORE = TokenLogprob(TokenId(1), -1.0)


async def test_request_fails_in_time_if_no_worker_is_reachable() -> None:
    scene = GenerationHarness()
    scene.d0.kill()
    scene.placer.prefill, scene.placer.decode = [], [scene.d0]
    with pytest.raises(Unavailable):
        await scene.collect()


async def test_retry_pauses_grow_until_the_registry_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests to a restarted worker fail as long as the router knows only its old incarnation, so
    the pauses between retries must be long enough for the router to read the registry."""
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
    ("steps", "what", "awaited", "other"),
    [
        (0, "first token", "p0", "d0"),
        (1, "decode worker's first token", "d0", "p0"),
        (3, "next token", "d0", "p0"),
    ],
)
def test_every_phase_ends_when_the_awaited_worker_makes_no_progress(
    steps: int, what: str, awaited: str, other: str
) -> None:
    async def main() -> None:
        scene = GenerationHarness(automatic=False)
        task = asyncio.create_task(scene.collect(replace(FAST, max_retries=0)))
        await settle()
        if steps:
            scene.p0.step()
        for _ in range(steps - 1):
            scene.d0.step()
        for _ in range(25):
            scene.workers[awaited].make_progress()
            await asyncio.sleep(0.04)
        progressed_at = scene.workers[awaited].progressed_at
        while not task.done():
            scene.workers[other].make_progress()
            await asyncio.sleep(0.001)
        seconds = asyncio.get_running_loop().time() - progressed_at
        assert 0.05 <= seconds < 0.052
        message = f"the {what} did not arrive: worker {awaited} has made no progress for 0.05 s"
        with pytest.raises(DeadlineExceeded, match=message):
            await task
        assert ("r", 1) in scene.d0.cancelled

    simulate(main())


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
    with pytest.raises(DeadlineExceeded, match="no workers were assigned to the request within"):
        await scene.collect(replace(FAST, placement_timeout_seconds=0.01))


async def test_full_output_queue_raises_overloaded() -> None:
    inbox = OutputQueue(max_unread=2)
    for _ in range(3):
        inbox.put(FakeWorker("w", answer).ref.id, Unavailable("x"))
    with pytest.raises(Overloaded, match="reads too slowly"):
        await inbox.get_batch()


def scored_output(index: int, *widths: int) -> RequestOutput:
    """Return an output of as many tokens as ``widths``, with so many alternatives each."""
    top = tuple((TokenId(token), -1.0) for token in range(max(widths)))
    scores = tuple(TokenLogprob(TokenId(1), -1.0, top[:width]) for width in widths)
    ids = (TokenId(1),) * len(widths)
    return RequestOutput(RequestId("r"), Epoch(1), index, ids, logprobs=scores)


async def test_output_queue_is_full_at_a_number_of_logprobs() -> None:
    inbox, worker = OutputQueue(max_logprobs=9), WorkerId("w")
    outputs = [scored_output(0, 2, 3), scored_output(2, 1)]  # 7 and 2 logprobs
    for _ in range(2):  # what was read does not count
        for output in outputs:
            inbox.put(worker, output)
        assert await inbox.get_batch() == [(worker, output) for output in outputs]
    plain = RequestOutput(RequestId("r"), Epoch(1), 3, (TokenId(1),), prompt_logprobs=(SCORE,) * 99)
    for output in (*outputs, plain, scored_output(4, 0)):
        inbox.put(worker, output)
    with pytest.raises(Overloaded, match="reads too slowly"):
        await inbox.get_batch()


async def test_output_with_more_logprobs_than_a_queue_holds_wakes_its_reader() -> None:
    inbox = OutputQueue(max_logprobs=20)
    reader = asyncio.create_task(inbox.get_batch())
    await asyncio.sleep(0)
    assert inbox.has_waiting_reader
    inbox.put(WorkerId("w"), scored_output(0, 20))
    with pytest.raises(Overloaded, match="reads too slowly"):
        await reader


async def test_output_queue_holds_780_tokens_with_20_alternatives() -> None:
    inbox, worker = OutputQueue(), WorkerId("w")
    outputs = [scored_output(index, 20) for index in range(780)]
    for output in outputs:
        inbox.put(worker, output)
    read: list[object] = []
    while len(read) < 780:
        batch = await inbox.get_batch()
        assert len(batch) == min(PACKED_OUTPUTS, 780 - len(read))
        read += batch
    assert read == [(worker, output) for output in outputs]
    for index in range(781):
        inbox.put(worker, scored_output(index, 20))
    with pytest.raises(Overloaded):
        await inbox.get_batch()


async def test_unread_outputs_are_packed() -> None:
    """Thousands of small objects that live for long would lie between others, so that their memory
    could not be given back."""
    inbox = OutputQueue()
    outputs = (scored_output(index, 20) for index in range(24 * PACKED_OUTPUTS))
    tracemalloc.start()
    try:
        for output in outputs:
            inbox.put(WorkerId("w"), output)
        blocks = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(False, "*/tracemalloc.py")]
        )
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in blocks.traces) < 500_000
    assert len(blocks.traces) < 500
    inbox.clear()
    inbox.put(WorkerId("w"), scored_output(0, 1))
    assert await inbox.get_batch() == [("w", scored_output(0, 1))]


async def test_outputs_of_several_workers_and_errors_keep_their_order() -> None:
    inbox = OutputQueue()
    items: list[tuple[WorkerId, RequestOutput | BatonError]] = [
        (WorkerId("p" if index == 40 else "d"), scored_output(index, 1)) for index in range(100)
    ]
    items[70] = (WorkerId("p"), Unavailable("x"))
    for worker_id, item in items:
        inbox.put(worker_id, item)
    read: list[object] = []
    while len(read) < 100:
        read += await inbox.get_batch()
    assert read == items
