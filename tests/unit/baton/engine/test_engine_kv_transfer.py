"""Tests KV transfers and imports between engines: progress, reservations, and imported prefixes."""

from dataclasses import replace

import pytest

from baton.core.block_key import block_keys
from baton.core.ids import BlockId, BlockKey, RequestId, TokenId
from baton.core.request import FinishReason, RequestSpec
from baton.core.task import Task
from baton.engine.block_pool import BlockCounts
from baton.engine.engine import EngineStats, PrefillProgress, Reservation, StepResult
from baton.engine.result import ScheduledPrompt, StepWork
from baton.errors import NotFound
from testkit.fakes.runner import reference_answer
from tests.engine_state import cached_tokens
from tests.unit.baton.engine.test_engine import CONFIG, PROMPT, Bench, spec, tokens_of, transfer_kv


def test_prefill_reports_progress_and_keeps_its_blocks_until_released() -> None:
    bench = Bench(config=replace(CONFIG, chunk_tokens=6))
    request = spec("a")
    keys = tuple(block_keys(bench.engine.key_root(b""), PROMPT, 4))
    bench.engine.add(request, Task.PREFILL)
    first, last = bench.engine.step(), bench.engine.step()
    table = (BlockId(0), BlockId(1), BlockId(2))
    assert first == StepResult(
        progress=(PrefillProgress(request.request_id, 6, table, keys[:1], 0),),
        work=StepWork(6, 21, 0.0, is_prefill=True),
        admitted=(ScheduledPrompt(request.request_id, 0.0, 0.0),),
    )
    assert last.admitted == ()
    assert last.progress == (PrefillProgress(request.request_id, 10, table, keys, 0),)
    (output,) = last.outputs
    assert output.token_ids == reference_answer(request)[0][:1]
    assert (output.first_index, output.finish_reason) == (0, None)
    assert not bench.engine.has_work()
    assert bench.engine.stats() == EngineStats(
        running=0,
        waiting=0,
        exported=1,
        reserved=0,
        queued_tokens=0,
        num_steps=2,
        num_preemptions=0,
        num_pauses=0,
        pool=BlockCounts(16, free=13, filling=1, idle=0, referenced=2, quarantined=0),
    )
    bench.engine.check_integrity()
    bench.engine.release_export(request.request_id)
    bench.engine.release_export(request.request_id)
    bench.engine.check_integrity()
    assert bench.pool() == BlockCounts(16, free=14, filling=0, idle=2, referenced=0, quarantined=0)


def test_cached_prefix_counts_as_progress_at_once() -> None:
    bench = Bench(config=replace(CONFIG, chunk_tokens=1))
    bench.engine.add(spec("a", max_tokens=1), Task.PREFILL_AND_DECODE)
    bench.run()
    bench.engine.add(spec("b"), Task.PREFILL)
    first, last = bench.engine.step().progress[0], bench.engine.step().progress[0]
    assert (first.num_computed_tokens, first.num_cached_tokens, len(first.sealed_keys)) == (9, 8, 2)
    assert last.num_computed_tokens == 10


def test_prefill_with_a_single_output_token_is_finished_and_kept() -> None:
    bench = Bench()
    bench.engine.add(spec("a", max_tokens=1), Task.PREFILL)
    (output,) = bench.run()
    assert output.finish_reason is FinishReason.LENGTH
    assert bench.engine.stats().exported == 1


def test_kv_transfer_changes_no_token() -> None:
    left, right = Bench(), Bench()
    first, reservation = transfer_kv(left, right, spec("a"))
    assert reservation == Reservation(tuple(BlockId(i) for i in range(3)), 0)
    outputs = right.run()
    assert (first, *tokens_of(outputs, "a")) == reference_answer(spec("a"))[0]
    assert [each.first_index for each in outputs] == [1, 2, 3, 4]
    assert [each.cached_tokens for each in outputs] == [0, 0, 0, 0]
    assert right.pool().idle == 3


def test_second_kv_transfer_reuses_all_full_blocks() -> None:
    left, right = Bench(), Bench()
    request = spec("a", PROMPT[:8])
    transfer_kv(left, right, request)
    right.run()
    first, reservation = transfer_kv(left, right, replace(request, request_id=RequestId("b")))
    assert reservation.num_cached_blocks == 2
    assert (first, *tokens_of(right.run(), "b")) == reference_answer(request)[0]


def test_lost_kv_changes_the_answer() -> None:
    """The other tests rely on this: with the fake runner, lost KV must be visible in the answer."""
    bench = Bench()
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    first = bench.engine.step().outputs
    bench.runner.import_block(BlockId(1), bytes(bench.runner.block_size_bytes))
    outputs = [*first, *bench.run()]
    assert tokens_of(outputs, "a")[1:] != reference_answer(spec("a"))[0][1:]


def test_start_with_the_last_token_ends_the_request() -> None:
    left, right = Bench(), Bench()
    transfer_kv(left, right, spec("a", max_tokens=1))
    assert not right.engine.has_work()
    assert right.engine.stats().running == 0
    assert right.pool().idle == 2
    with pytest.raises(NotFound):
        right.engine.start_decoding(RequestId("a"), TokenId(1))


def test_reservation_that_does_not_fit_succeeds_later() -> None:
    bench = Bench(num_blocks=4)
    bench.engine.add(spec("a", PROMPT[:5], max_tokens=3), Task.PREFILL_AND_DECODE)
    bench.engine.step()
    assert bench.engine.reserve_blocks(spec("b")) is None
    bench.run()
    assert bench.engine.reserve_blocks(spec("b")) is not None


def test_aborted_reservation_can_be_quarantined() -> None:
    bench = Bench()
    bench.engine.add(spec("a", max_tokens=1), Task.PREFILL_AND_DECODE)
    bench.run()
    reservation = bench.engine.reserve_blocks(spec("b"))
    assert reservation is not None
    assert (reservation.num_cached_blocks, len(reservation.block_ids)) == (2, 3)
    assert bench.engine.abort(RequestId("b"), quarantine=True)
    bench.engine.check_integrity()
    assert bench.pool() == BlockCounts(16, free=13, filling=0, idle=2, referenced=0, quarantined=1)
    bench.engine.release_quarantine(reservation.block_ids[2:])
    assert bench.pool().free == 14


def store_of(bench: Bench, request: RequestSpec) -> tuple[list[BlockKey], list[bytes]]:
    """Compute the prompt. Return the keys and the contents of its full blocks, as a KV store holds
    them."""
    bench.engine.add(request, Task.PREFILL)
    (progress,) = bench.engine.step().progress
    data = [
        bench.runner.export_block(each) for each in progress.block_ids[: len(progress.sealed_keys)]
    ]
    return list(progress.sealed_keys), data


def test_imported_prefix_is_a_cached_prefix() -> None:
    keys, data = store_of(Bench(), spec("a", PROMPT[:9]))
    bench = Bench()
    block_ids = bench.engine.begin_import(keys)
    assert block_ids == [0, 1]
    bench.engine.check_integrity()
    assert cached_tokens(bench.engine, spec("b")) == 0
    for block_id, each in zip(block_ids, data, strict=True):
        bench.runner.import_block(block_id, each)
    bench.engine.finish_import(keys, block_ids, 2)
    bench.engine.add(spec("b"), Task.PREFILL_AND_DECODE)
    outputs = bench.run()
    assert outputs[0].cached_tokens == 8
    assert tokens_of(outputs, "b") == reference_answer(spec("b"))[0]


def test_partly_failed_import_quarantines_the_rest() -> None:
    keys, _ = store_of(Bench(), spec("a"))
    bench = Bench()
    block_ids = bench.engine.begin_import(keys)
    assert block_ids is not None
    bench.engine.finish_import(keys, block_ids, 1, quarantine=True)
    assert cached_tokens(bench.engine, spec("a")) == 4
    assert bench.pool() == BlockCounts(16, free=14, filling=0, idle=1, referenced=0, quarantined=1)
    bench.engine.release_quarantine(block_ids[1:])
    bench.engine.check_integrity()


def test_import_of_blocks_computed_meanwhile_is_freed() -> None:
    bench = Bench()
    keys = block_keys(bench.engine.key_root(b""), PROMPT, 4)
    block_ids = bench.engine.begin_import(keys)
    assert block_ids == [0, 1]
    bench.engine.add(spec("a", max_tokens=1), Task.PREFILL_AND_DECODE)
    bench.run()
    bench.engine.finish_import(keys, block_ids, 2)
    bench.engine.check_integrity()
    assert bench.pool() == BlockCounts(16, free=14, filling=0, idle=2, referenced=0, quarantined=0)


def test_import_does_not_evict_the_prefix_that_it_extends() -> None:
    bench = Bench(num_blocks=4)
    long = tuple(TokenId(token) for token in range(16))
    keys = block_keys(bench.engine.key_root(b""), long, 4)
    head = bench.engine.begin_import(keys[:2])
    assert head is not None
    bench.engine.finish_import(keys[:2], head, 2)
    assert bench.engine.begin_import(keys[2:] + keys[:1], preceding_keys=keys[:2]) is None
    tail = bench.engine.begin_import(keys[2:], preceding_keys=keys[:2])
    assert tail == [2, 3]
    bench.engine.finish_import(keys[2:], tail, 2)
    assert cached_tokens(bench.engine, spec("a", long)) == 16
    # The leaf is evicted before its parents.
    assert bench.engine.begin_import(block_keys(BlockKey(bytes(16)), long[:4], 4)) == [3]


def test_import_leaves_the_watermark_to_running_requests() -> None:
    bench = Bench(num_blocks=4, config=replace(CONFIG, watermark_blocks=1))
    bench.engine.add(spec("a", PROMPT[:5]), Task.PREFILL_AND_DECODE)
    bench.engine.step()
    keys = block_keys(BlockKey(bytes(16)), PROMPT[:8], 4)
    assert bench.engine.begin_import(keys) is None
    assert bench.engine.begin_import(keys[:1]) == [2]
    assert bench.engine.begin_import([]) == []
    bench.engine.finish_import([], [], 0)
