"""The engine's methods over a fake runner, with exact outputs, blocks and refusals."""

from dataclasses import replace
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.core.block_key import KeyRoot, block_keys
from baton.core.ids import BlockId, BlockKey, Epoch, RequestId, TokenId
from baton.core.request import FinishReason, RequestOutput, RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.block_pool import BlockCounts
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine, EngineStats, PrefillProgress, Reservation, StepResult
from baton.engine.fake_runner import FakeRunner, reference_answer
from baton.engine.plan import Plan, StepOutput
from baton.engine.result import ScheduledPrompt, StepWork
from baton.errors import Invalid, NotFound, Overloaded
from tests.engine_state import cached_tokens

CONFIG = EngineConfig(
    block_tokens=4, max_model_tokens=64, max_batched_tokens=16, watermark_blocks=0, growth_tokens=6
)
PROMPT = tuple(TokenId(token) for token in range(10, 20))


def spec(
    name: str,
    token_ids: tuple[TokenId, ...] = PROMPT,
    *,
    emitted: int = 0,
    max_tokens: int = 5,
    **sampling: Any,
) -> RequestSpec:
    return RequestSpec(
        RequestId(name),
        Epoch(2),
        token_ids,
        len(token_ids) - emitted,
        SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),
    )


class Bench:
    def __init__(
        self,
        num_blocks: int = 16,
        config: EngineConfig = CONFIG,
        eos: frozenset[TokenId] = frozenset(),
    ) -> None:
        self.runner = FakeRunner(num_blocks, config.block_tokens)
        self.clock = ManualClock()
        self.engine = Engine(
            self.runner,
            config,
            model_digest=b"model",
            kv_dtype="float32",
            eos_token_ids=eos,
            clock=self.clock,
        )

    def run(self) -> list[RequestOutput]:
        """Run steps until there is no work, and check the engine's integrity after each."""
        outputs: list[RequestOutput] = []
        while self.engine.has_work():
            outputs += self.engine.step().outputs
            self.engine.check_integrity()
        return outputs

    def pool(self) -> BlockCounts:
        return self.engine.stats().pool


def tokens_of(outputs: list[RequestOutput], name: str) -> tuple[TokenId, ...]:
    return tuple(t for each in outputs if each.request_id == name for t in each.token_ids)


def transfer_kv(left: Bench, right: Bench, request: RequestSpec) -> tuple[TokenId, Reservation]:
    """Compute the prompt on ``left``, copy its KV, and start decoding on ``right``."""
    left.engine.add(request, Task.PREFILL)
    result = StepResult()
    while not result.outputs:
        result = left.engine.step()
    source = result.progress[0].block_ids
    reservation = right.engine.reserve_blocks(request)
    assert reservation is not None
    for index in range(reservation.num_cached_blocks, len(source)):
        data = left.runner.export_block(source[index])
        right.runner.import_block(reservation.block_ids[index], data)
    (token_id,) = result.outputs[0].token_ids
    right.engine.start_decoding(request.request_id, token_id)
    left.engine.release_export(request.request_id)
    return token_id, reservation


def test_whole_request_generates_the_reference_answer() -> None:
    bench = Bench()
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    outputs = bench.run()
    expected, reason = reference_answer(spec("a"))
    assert tokens_of(outputs, "a") == expected
    assert reason is FinishReason.LENGTH
    assert [each.first_index for each in outputs] == [0, 1, 2, 3, 4]
    assert [each.epoch for each in outputs] == [2] * 5
    assert [each.finish_reason for each in outputs] == [None] * 4 + [FinishReason.LENGTH]
    # 14 tokens computed: three full blocks stay cached, the partial one is free.
    assert bench.pool() == BlockCounts(16, free=13, filling=0, idle=3, referenced=0, quarantined=0)


def test_step_reports_newly_scheduled_prompts_and_their_queue_time() -> None:
    bench = Bench(config=replace(CONFIG, max_batched_tokens=12, chunk_tokens=12))
    others = tuple(TokenId(token) for token in range(30, 40))
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    bench.clock.advance(2.0)
    bench.engine.add(replace(spec("b"), token_ids=others), Task.PREFILL_AND_DECODE)
    bench.clock.advance(1.0)
    first = bench.engine.step()  # all of a's prompt, and the beginning of b's
    assert first.admitted == (
        ScheduledPrompt(RequestId("a"), 3.0, 3.0),
        ScheduledPrompt(RequestId("b"), 3.0, 1.0),
    )
    assert first.work is not None
    assert (first.work.num_rows, first.work.num_decodes, first.work.num_tokens) == (2, 0, 12)
    second = bench.engine.step()  # a token of a's answer, and the rest of b's prompt
    assert second.admitted == ()
    assert second.work is not None
    assert (second.work.num_rows, second.work.num_decodes, second.work.num_tokens) == (2, 1, 9)


def test_preempted_request_is_reported_as_scheduled_only_once() -> None:
    bench = Bench(num_blocks=6, config=replace(CONFIG, forecasts_memory=False))
    for name, first in (("a", 100), ("b", 200)):
        tokens = tuple(TokenId(first + number) for number in range(9))
        request = replace(spec(name), token_ids=tokens, num_prompt_tokens=9)
        sampling = replace(request.sampling, max_tokens=8)
        bench.engine.add(replace(request, sampling=sampling), Task.PREFILL_AND_DECODE)
    begun: list[str] = []
    preempted: list[str] = []
    while bench.engine.has_work():
        result = bench.engine.step()
        begun += [each.request_id for each in result.admitted]
        preempted += result.preempted
    assert preempted == ["b"] * bench.engine.stats().num_preemptions and preempted
    assert sorted(begun) == ["a", "b"]


def test_eos_ends_the_answer_and_is_part_of_it() -> None:
    answer, _ = reference_answer(spec("a"))
    bench = Bench(eos=frozenset({answer[2]}))
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    bench.engine.add(spec("b", ignore_eos=True), Task.PREFILL_AND_DECODE)
    outputs = bench.run()
    assert tokens_of(outputs, "a") == answer[:3]
    assert [o.finish_reason for o in outputs if o.request_id == "a"][-1] is FinishReason.STOP
    assert tokens_of(outputs, "b") == answer


def test_stop_tokens_are_masked_until_min_tokens() -> None:
    """``min_tokens`` counts tokens of the answer on whichever worker they are generated: the
    third token may be the last."""
    left, right = Bench(eos=frozenset({TokenId(9)})), Bench(eos=frozenset({TokenId(9)}))
    masked: list[set[TokenId]] = []
    for bench in (left, right):
        run = bench.runner.run
        bench.runner.run = lambda plan, run=run: (  # type: ignore[method-assign, misc]
            masked.extend(set(row.suppressed_token_ids) for row in plan.rows if row.sample),
            run(plan),
        )[1]  # fmt: skip
    request = spec("a", min_tokens=2, stop_token_ids=(TokenId(7),), max_tokens=4)
    transfer_kv(left, right, request)
    right.run()
    assert masked == [{7, 9}, {7, 9}, set(), set()]


def test_stop_token_ends_the_answer_even_if_eos_is_ignored() -> None:
    answer, _ = reference_answer(spec("a"))
    request = spec("a", ignore_eos=True, stop_token_ids=(answer[1],))
    bench = Bench()
    bench.engine.add(request, Task.PREFILL_AND_DECODE)
    outputs = bench.run()
    assert tokens_of(outputs, "a") == answer[:2]
    assert outputs[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_failover_continues_the_answer(penalty: float) -> None:
    answer, _ = reference_answer(spec("a", presence_penalty=penalty))
    bench = Bench()
    again = spec("a", PROMPT + answer[:2], emitted=2, presence_penalty=penalty)
    bench.engine.add(again, Task.PREFILL_AND_DECODE)
    outputs = bench.run()
    assert tokens_of(outputs, "a") == answer[2:]
    assert [each.first_index for each in outputs] == [2, 3, 4]


def test_token_history_goes_to_the_runner_only_with_penalties() -> None:
    bench = Bench()
    plans: list[Plan] = []
    run = bench.runner.run

    def spy(plan: Plan) -> StepOutput:
        plans.append(plan)
        return run(plan)

    bench.runner.run = spy  # type: ignore[method-assign]
    bench.engine.add(spec("a", PROMPT[:3], max_tokens=2), Task.PREFILL_AND_DECODE)
    bench.engine.add(
        spec("b", PROMPT[:4], max_tokens=2, frequency_penalty=0.1), Task.PREFILL_AND_DECODE
    )
    outputs = bench.run()
    b0 = outputs[1].token_ids
    histories = [[(row.history, row.num_prompt_tokens) for row in plan.rows] for plan in plans]
    assert histories == [
        [((), 0), (PROMPT[:4], 4)],
        [((), 0), (PROMPT[:4] + b0, 4)],
    ]


def test_logprobs_are_returned_if_requested() -> None:
    bench = Bench()
    bench.engine.add(spec("a", max_tokens=1, logprobs=2), Task.PREFILL_AND_DECODE)
    bench.engine.add(spec("b", max_tokens=1), Task.PREFILL_AND_DECODE)
    with_logprobs, without = bench.run()
    (logprob,) = with_logprobs.logprobs
    assert (logprob.token_id,) == with_logprobs.token_ids
    assert len(logprob.top) == 2
    assert without.logprobs == ()


def test_cached_tokens_are_reported_with_the_first_output() -> None:
    bench = Bench()
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    assert [each.cached_tokens for each in bench.run()] == [0, 0, 0, 0, 0]
    assert cached_tokens(bench.engine, spec("b")) == 8
    bench.engine.add(spec("b"), Task.PREFILL_AND_DECODE)
    outputs = bench.run()
    assert [each.cached_tokens for each in outputs] == [8, 0, 0, 0, 0]
    assert tokens_of(outputs, "b") == reference_answer(spec("b"))[0]


def test_cached_tokens_are_never_more_than_the_prompt() -> None:
    bench = Bench()
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    answer = tokens_of(bench.run(), "a")
    bench.engine.add(spec("b", PROMPT + answer[:4], emitted=4), Task.PREFILL_AND_DECODE)
    (output,) = bench.run()
    assert output.cached_tokens == len(PROMPT)


def test_tenants_share_no_cached_blocks() -> None:
    bench = Bench()
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    bench.run()
    other = replace(spec("b"), tenant_salt=b"other")
    assert cached_tokens(bench.engine, other) == 0
    assert (
        bench.engine.key_root(b"other")
        == KeyRoot(b"model", "float32", 4, tenant_salt=b"other").key()
    )


def test_cached_tokens_depend_on_tokens_and_not_on_the_request_id() -> None:
    bench = Bench()
    assert cached_tokens(bench.engine, spec("a")) == 0
    bench.engine.add(spec("a", PROMPT[::-1]), Task.PREFILL_AND_DECODE)
    bench.engine.check_integrity()
    bench.run()
    assert cached_tokens(bench.engine, spec("b")) == 0
    assert cached_tokens(bench.engine, spec("b", PROMPT[::-1])) == 8


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
    """The fake runner would be useless if lost KV went unnoticed."""
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


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("task", [Task.PREFILL_AND_DECODE, Task.PREFILL])
def test_abort_in_any_phase_frees_everything(task: Task, num_steps: int) -> None:
    bench = Bench(config=replace(CONFIG, chunk_tokens=5))
    bench.engine.add(spec("a"), task)
    for _ in range(num_steps):
        bench.engine.step()
    assert bench.engine.abort(RequestId("a"))
    assert not bench.engine.abort(RequestId("a"))
    bench.engine.check_integrity()
    assert not bench.engine.has_work()
    pool = bench.pool()
    assert pool.free + pool.idle == 16
    bench.engine.add(spec("a"), task)


def store_of(bench: Bench, request: RequestSpec) -> tuple[list[BlockKey], list[bytes]]:
    """Return keys and content of the prompt's full blocks, as a store would have them."""
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


@pytest.mark.parametrize(
    ("request_spec", "message"),
    [
        (spec("a", ()), "num_prompt_tokens is 0"),
        (spec("a", max_tokens=0), "there is nothing left to generate"),
        (spec("a", emitted=5), "there is nothing left to generate"),
        (spec("a", max_tokens=55), "10 tokens and 55 to generate are more than the 64"),
        (spec("a", max_tokens=36), "the request needs 12 KV blocks, and there are 11"),
    ],
)
def test_request_that_can_never_be_served_is_refused(
    request_spec: RequestSpec, message: str
) -> None:
    bench = Bench(num_blocks=11)
    with pytest.raises(Invalid, match=message):
        bench.engine.add(request_spec, Task.PREFILL_AND_DECODE)
    with pytest.raises(Invalid, match=message):
        bench.engine.reserve_blocks(request_spec)


def test_largest_request_that_fits_is_served() -> None:
    bench = Bench(num_blocks=11)
    bench.engine.add(spec("a", max_tokens=35), Task.PREFILL_AND_DECODE)
    assert tokens_of(bench.run(), "a") == reference_answer(spec("a", max_tokens=35))[0]


def test_prefill_only_request_needs_no_room_for_its_answer() -> None:
    bench = Bench(num_blocks=3)
    bench.engine.add(spec("a", max_tokens=54), Task.PREFILL)
    assert len(bench.run()) == 1


def test_duplicate_request_id_is_rejected() -> None:
    bench = Bench()
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    with pytest.raises(Invalid, match="request id a is already in use"):
        bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    with pytest.raises(Invalid, match="request id a is already in use"):
        bench.engine.reserve_blocks(spec("a"))


def test_full_queue_raises_overloaded() -> None:
    bench = Bench(config=replace(CONFIG, max_waiting=1))
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    with pytest.raises(Overloaded, match="1 requests are waiting already"):
        bench.engine.add(spec("b"), Task.PREFILL_AND_DECODE)
    bench.engine.step()
    bench.engine.add(spec("b"), Task.PREFILL_AND_DECODE)


def test_engine_and_runner_agree_on_the_block_size() -> None:
    with pytest.raises(Invalid, match="block_tokens is 4, the runner's is 8"):
        Engine(
            FakeRunner(4, 8),
            CONFIG,
            model_digest=b"",
            kv_dtype="float32",
            eos_token_ids=frozenset(),
            clock=ManualClock(),
        )


def test_queued_tokens_count_uncomputed_prompt_tokens() -> None:
    bench = Bench(config=replace(CONFIG, max_sequences=2))
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    bench.engine.step()
    bench.engine.add(spec("b", PROMPT[::-1] * 3), Task.PREFILL_AND_DECODE)
    bench.engine.add(spec("c", PROMPT[::-1]), Task.PREFILL_AND_DECODE)
    bench.engine.step()  # a decodes, b computes 15 of 30, c waits
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting, stats.queued_tokens) == (2, 1, 25)


def test_check_integrity_notices_a_lost_reference() -> None:
    bench = Bench()
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    bench.engine.step()
    bench.engine.check_integrity()
    bench.engine._pool.reference([BlockId(0)])
    with pytest.raises(AssertionError, match="block 0: 1 owners, 2 references"):
        bench.engine.check_integrity()


def test_describe_draws_the_pool_and_the_requests() -> None:
    bench = Bench(num_blocks=4)
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    bench.engine.step()
    assert bench.engine.describe().splitlines() == [
        "4 blocks: 1 free 1 filling 2 referenced 0 idle 0 quarantined",
        ".=free f=filling #=referenced i=idle q=quarantined",
        "      0 ##f.",
        "a whole running arrival=1 tokens=10/11 blocks=[0, 1, 2]",
    ]


def num_computed_tokens_of(bench: Bench, *requests: RequestSpec) -> int:
    """Run the requests, check their answers, and return the number of computed tokens."""
    for request in requests:
        bench.engine.add(request, Task.PREFILL_AND_DECODE)
    total = 0
    answers: dict[str, tuple[int, ...]] = {}
    while bench.engine.has_work():
        result = bench.engine.step()
        bench.engine.check_integrity()
        assert result.work is not None
        total += result.work.num_tokens
        for output in result.outputs:
            answers[output.request_id] = answers.get(output.request_id, ()) + output.token_ids
    for request in requests:
        assert answers[request.request_id] == reference_answer(request)[0]
    return total


def test_samples_of_one_prompt_compute_the_prompt_once() -> None:
    """Full blocks are shared, the partial last block is copied, and each sample computes the
    last token itself."""
    requests = [spec(name, max_tokens=2) for name in "abc"]
    assert num_computed_tokens_of(Bench(), *requests) == (len(PROMPT) + 1) + 2 + 2


def test_partial_block_is_copied_from_a_request_that_is_further_ahead() -> None:
    bench = Bench()
    bench.engine.add(spec("a", max_tokens=8), Task.PREFILL_AND_DECODE)
    for _ in range(5):
        bench.engine.step()
    assert bench.engine.num_computed_tokens(RequestId("a")) == len(PROMPT) + 4
    bench.engine.add(spec("b", max_tokens=1), Task.PREFILL_AND_DECODE)
    result = bench.engine.step()
    assert result.work is not None
    assert result.work.num_tokens == 2  # a's next token, and the last prompt token of b
    (output,) = [output for output in result.outputs if output.request_id == "b"]
    assert output.cached_tokens == len(PROMPT) - 1
    assert output.token_ids == reference_answer(spec("b", max_tokens=1))[0]


def test_partial_blocks_of_other_tenants_are_not_copied() -> None:
    one, other = spec("a", max_tokens=1), replace(spec("b", max_tokens=1), tenant_salt=b"x")
    assert num_computed_tokens_of(Bench(), one, other) == 2 * len(PROMPT)


def test_copied_partial_block_is_never_full() -> None:
    """The request that fills a block seals it at the end of its step. Here two requests could
    copy a whole block, since its key is forgotten, and only one of them is computed in that
    step."""
    bench = Bench(num_blocks=12)
    bench.engine.add(spec("a", max_tokens=1), Task.PREFILL_AND_DECODE)
    bench.run()
    # With prompt_logprobs, b reuses nothing.
    bench.engine.add(spec("b", max_tokens=8, prompt_logprobs=0), Task.PREFILL_AND_DECODE)
    bench.engine.step()
    keys = block_keys(BlockKey(b"k" * 32), [TokenId(1)] * 36, 4)
    block_ids = bench.engine.begin_import(keys)
    assert block_ids is not None  # all cached blocks of a are evicted; b's blocks are duplicates
    bench.engine.finish_import(keys, block_ids, 0)
    assert cached_tokens(bench.engine, spec("a")) == 0
    for name in "cd":
        bench.engine.add(spec(name, max_tokens=1), Task.PREFILL_AND_DECODE)
    outputs = bench.run()
    for name in "cd":
        assert tokens_of(outputs, name) == reference_answer(spec(name, max_tokens=1))[0]
