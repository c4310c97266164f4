"""Tests the engine's methods over a fake runner, with exact outputs, blocks and refusals."""

from collections.abc import Sequence
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
from baton.engine.engine import Engine, Reservation, StepResult
from baton.engine.plan import Plan, StepOutput
from baton.engine.result import ScheduledPrompt
from testkit.fakes.runner import FakeRunner, reference_answer
from tests.engine_state import cached_tokens, exported_blocks

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
        self.runner = FakeRunner(
            num_blocks,
            config.block_tokens,
            window=config.window_tokens,
            groups=(config.num_full_groups, config.num_windowed_groups),
        )
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
        """Run steps until there is no work, and check the engine's integrity after each step."""
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
    source = exported_blocks(left.engine, result.progress[0], request.attention_window)
    reservation = right.engine.reserve_blocks(request)
    assert reservation is not None
    for index in range(reservation.num_cached_blocks, len(source)):
        data = left.runner.export_block(source[index])
        right.runner.import_block(reservation.block_ids[index], data)
    (token_id,) = result.outputs[0].token_ids
    right.engine.start_decoding(request.request_id, token_id)
    left.engine.release_export(request.request_id)
    return token_id, reservation


def migrate(
    left: Bench, right: Bench, request: RequestSpec, num_tokens: int
) -> tuple[tuple[TokenId, ...], Sequence[BlockId]]:
    """Generate ``num_tokens`` on ``left``, copy the KV, and generate the rest on ``right``. Return
    all tokens, and the blocks that ``left`` had at the migration."""
    left.engine.add(request, Task.PREFILL_AND_DECODE)
    tokens: list[TokenId] = []
    while len(tokens) < num_tokens:
        tokens += tokens_of(list(left.engine.step().outputs), request.request_id)
    moved = left.engine.begin_migration(request.request_id, RequestId("export"))
    assert moved is not None
    known = (*request.token_ids, *tokens)
    rest = replace(request, request_id=RequestId("rest"), token_ids=known[:-1])
    reservation = right.engine.reserve_blocks(rest)
    assert reservation is not None
    source = exported_blocks(left.engine, moved.progress, request.attention_window)
    for one, other in zip(source, reservation.block_ids, strict=True):
        right.runner.import_block(other, left.runner.export_block(one))
    right.engine.start_decoding(rest.request_id, moved.last_token_id)
    tokens += tokens_of(right.run(), "rest")
    left.engine.abort(RequestId("export"))
    left.engine.check_integrity()
    return tuple(tokens), moved.progress.block_ids


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
    """``min_tokens`` applies to the whole answer, whichever workers generate its tokens: with two
    of them required, the third may be a stop token."""
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


def test_cold_prompts_at_once_reuse_the_tokens_that_they_begin_with() -> None:
    """Requests that arrive together reuse less than a block: the tokens of a chat template that
    precede the first different one. All tokens are either computed or reported as cached."""
    bench = Bench(num_blocks=64)
    prompts = {
        f"r{number}": tuple(TokenId(token) for token in (1, 2, 3 + number, 40 - number, 5))
        for number in range(6)
    }
    for name, tokens in prompts.items():
        request = replace(spec(name, max_tokens=1), token_ids=tokens, num_prompt_tokens=5)
        bench.engine.add(request, Task.PREFILL_AND_DECODE)
    computed, cached = 0, dict[str, int]()
    while len(cached) < len(prompts):
        result = bench.engine.step()
        assert result.work is not None
        computed += result.work.num_tokens
        cached |= {output.request_id: output.cached_tokens for output in result.outputs}
    assert cached == {"r0": 0, "r1": 0, "r2": 0, "r3": 0, "r4": 1, "r5": 1}
    assert computed + sum(cached.values()) == 5 * len(prompts)


def test_partial_blocks_of_other_tenants_are_not_copied() -> None:
    one, other = spec("a", max_tokens=1), replace(spec("b", max_tokens=1), tenant_salt=b"x")
    assert num_computed_tokens_of(Bench(), one, other) == 2 * len(PROMPT)


def test_copied_partial_block_is_never_full() -> None:
    """A block is sealed by the request that computes its last token. So a request copies at most
    the tokens before the last one from another request's block. Here b has a full block whose key
    is not in the pool, so c and d can't share it, and copy all of its tokens but the last. In the
    next step, only one of c and d computes the last token and seals its block; the other waits for
    that, and then shares the sealed block."""
    bench = Bench(num_blocks=12)
    bench.engine.add(spec("a", max_tokens=1), Task.PREFILL_AND_DECODE)
    bench.run()
    # With ``prompt_logprobs``, b reuses no cached blocks.
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
