"""Tests generations whose worker drains: migration with the KV, and recomputation on another
worker."""

import asyncio
from dataclasses import replace

import pytest

from baton.core.request import (
    FinishReason,
)
from baton.core.task import Task
from tests.unit.router.generation.test_generation import (
    FAST,
    PROMPT,
    GenerationHarness,
    expected_tokens,
    settle,
)


@pytest.mark.parametrize("emitted", [1, 2, 7])
async def test_draining_worker_migrates_its_answer(emitted: int) -> None:
    """The next worker imports the KV of all known tokens except the last one. The client does not
    get the last token again."""
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
    """The number of migrations has a bound of its own, and may exceed ``max_retries``."""
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


async def test_rerouted_answer_is_recomputed_on_another_worker() -> None:
    """The draining worker keeps no KV of the answer, so the next prefill computes the prompt and
    the tokens generated so far."""
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
