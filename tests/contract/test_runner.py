"""Tests what a worker needs of :class:`baton.engine.runner.ModelRunner`: of the native CPU kernels,
where they run, and of torch's operators."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams, TokenLogprob
from baton.engine.plan import UNKNOWN_TOKEN, Plan, Row, StepOutput
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from testkit.model_zoo import make_model

ARCHITECTURE = "qwen3"
VOCAB_SIZE = 512
BLOCK_TOKENS = 32
NUM_BLOCKS = 48
MAX_SEQUENCES = 8
MAX_BATCHED_TOKENS = 256
MAX_MODEL_TOKENS = 384
PROMPT_TOKENS = 75
"""Two blocks and a part of the third."""

ANSWER_TOKENS = 24
"""So many that the answer enters a block of its own."""

GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)
SEEDED = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=1.0, seed=11)
NO_TOKEN = bytes(VOCAB_SIZE // 8)
LOGPROB_TOLERANCE = 1e-4


def runner_options(**changes: Any) -> RunnerOptions:
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "num_blocks": NUM_BLOCKS,
        "block_tokens": BLOCK_TOKENS,
        "max_sequences": MAX_SEQUENCES,
        "max_batched_tokens": MAX_BATCHED_TOKENS,
        "max_model_tokens": MAX_MODEL_TOKENS,
    }
    return RunnerOptions(**{**options, **changes})


def prompt(seed: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    chance = np.random.default_rng(seed)
    return [int(token) for token in chance.integers(3, VOCAB_SIZE, size=num_tokens)]


def allow_only(*tokens: int) -> bytes:
    bits = np.zeros(VOCAB_SIZE, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


class FixedMask:
    """A stand-in for a grammar's state. Its method ``mask``, which is called during the step,
    always returns the same mask."""

    def __init__(self, bits: bytes) -> None:
        self._bits = bits

    def mask(self) -> bytes:
        return self._bits


@dataclass
class Request:
    """A request as the scheduler plans it. ``tokens`` are its prompt (``num_prompt_tokens`` tokens)
    and the answer so far. The KV of the first ``num_computed`` of them is in the blocks
    ``block_ids``."""

    name: str
    tokens: list[int]
    block_ids: list[int]
    sampling: SamplingParams = GREEDY
    num_computed: int = 0
    num_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.tokens)

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def row(self, max_tokens: int | None = None, **fields: Any) -> Row:
        """Return the row that computes all tokens that are not computed yet, or the first
        ``max_tokens`` of them. If the row computes the last known token, it also samples the next
        one."""
        missing = self.tokens[self.num_computed :][:max_tokens]
        end = self.num_computed + len(missing)
        assert end <= len(self.block_ids) * BLOCK_TOKENS
        if self.sampling.needs_history:
            fields["history"] = tuple(self.tokens)
            fields["num_prompt_tokens"] = self.num_prompt_tokens
        if self.sampling.prompt_logprobs is not None and self.num_computed < self.num_prompt_tokens:
            targets = self.tokens[self.num_computed + 1 : end + 1][: len(missing)]
            fields["prompt_logprob_targets"] = tuple(targets)
        return Row(
            RequestId(self.name),
            tuple(TokenId(token) for token in missing),
            self.num_computed,
            tuple(BlockId(block) for block in self.block_ids[: -(-end // BLOCK_TOKENS)]),
            sample=end == len(self.tokens),
            sampling=self.sampling,
            **fields,
        )


class Steps:
    """Runs steps on a runner, and gives requests blocks that no other request of the test has. All
    blocks contain random numbers at first, as if earlier requests had used them."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._step = 0
        self._free = np.random.default_rng(5).permutation(NUM_BLOCKS).tolist()
        floats = runner.pool.tensor.view(torch.float32)
        floats.copy_(torch.randn(floats.shape, generator=torch.Generator().manual_seed(3)))

    def blocks(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // BLOCK_TOKENS)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def request(self, name: str, tokens: list[int], sampling: SamplingParams = GREEDY) -> Request:
        blocks = self.blocks(len(tokens) + sampling.max_tokens)
        return Request(name, list(tokens), blocks, sampling)

    def run(self, *rows: Row, copies: Iterable[tuple[int, int]] = ()) -> StepOutput:
        self._step += 1
        pairs = tuple((BlockId(source), BlockId(target)) for source, target in copies)
        output = self.runner.run(Plan(self._step, rows, pairs))
        assert len(output.sampled) == len(rows)
        return output

    def advance(
        self,
        *requests: Request,
        max_tokens: int | None = None,
        copies: Iterable[tuple[int, int]] = (),
    ) -> StepOutput:
        """Run one step for the requests, in this order, and add the sampled tokens to them."""
        rows = [request.row(max_tokens) for request in requests]
        output = self.run(*rows, copies=copies)
        for request, row, sampled in zip(requests, rows, output.sampled, strict=True):
            request.num_computed = row.context_tokens
            assert (sampled is not None) == row.sample
            if sampled is not None:
                request.tokens.append(sampled.token_id)
        return output

    def finish(self, request: Request, max_tokens: int | None = None) -> list[int]:
        """Run the request by itself to its end, in chunks of ``max_tokens``; return its answer."""
        while len(request.answer) < request.sampling.max_tokens:
            self.advance(request, max_tokens=max_tokens)
        return request.answer

    def move(self, request: Request) -> list[int]:
        """Copy a request's blocks to others bytewise, as a KV transfer does, and overwrite the
        original ones. Return the new blocks."""
        moved = self.blocks(len(request.block_ids) * BLOCK_TOKENS)
        memory = self.runner.pool.tensor
        for source, target in zip(request.block_ids, moved, strict=True):
            memory[target].copy_(memory[source])
            memory[source].zero_()
        return moved


def approximately(logprobs: Iterable[TokenLogprob]) -> object:
    return pytest.approx([each.logprob for each in logprobs], abs=LOGPROB_TOLERANCE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), ARCHITECTURE)


@pytest.fixture(scope="module", params=["auto", "off"])
def runner(request: pytest.FixtureRequest, model: Path) -> ModelRunner:
    """A runner with the native CPU kernels, where they run, and one with torch's operators."""
    return ModelRunner.load(model, runner_options(cpu_kernels=request.param))


@pytest.fixture
def steps(runner: ModelRunner) -> Steps:
    return Steps(runner)


def test_the_pool_is_blocks_of_equal_size_in_memory_that_others_can_map(
    runner: ModelRunner, steps: Steps
) -> None:
    pool = runner.pool
    assert (runner.num_blocks, runner.block_tokens) == (NUM_BLOCKS, BLOCK_TOKENS)
    assert (pool.num_blocks, pool.block_tokens) == (NUM_BLOCKS, BLOCK_TOKENS)
    assert pool.size_bytes == NUM_BLOCKS * pool.block_bytes
    assert pool.tensor.shape[0] == NUM_BLOCKS and pool.tensor.is_contiguous()
    assert pool.tensor.data_ptr() == pool.address
    request = steps.request("a", prompt(1))
    before = os.pread(pool.file_descriptor, pool.size_bytes, 0)
    steps.advance(request)
    after = os.pread(pool.file_descriptor, pool.size_bytes, 0)
    size = pool.block_bytes
    changed = {
        block
        for block in range(NUM_BLOCKS)
        if before[block * size :][:size] != after[block * size :][:size]
    }
    assert changed == set(request.block_ids[:3])
    assert after == bytes(pool.tensor.view(torch.uint8).flatten().numpy())


def test_the_limits_are_those_of_the_model(runner: ModelRunner) -> None:
    assert runner.limits.vocab_size == VOCAB_SIZE
    assert runner.limits.max_position_embeddings >= MAX_MODEL_TOKENS
    assert set(runner.limits.eos_token_ids) == {1, 2}
    assert runner.kv_dtype == "float32"
    assert runner.quantization == "none" and runner.numerics_fingerprint == ""


@pytest.mark.parametrize("max_tokens", [1, 7, BLOCK_TOKENS, BLOCK_TOKENS + 1])
def test_chunks_of_a_prompt_give_the_answer_of_the_whole_prompt(
    steps: Steps, max_tokens: int
) -> None:
    whole = steps.finish(steps.request("whole", prompt(1)))
    assert len(set(whole)) > ANSWER_TOKENS // 2, "an answer that says nothing about the KV"
    assert steps.finish(steps.request("chunks", prompt(1)), max_tokens) == whole


def test_each_token_of_an_answer_is_that_of_a_prompt_that_ends_before_it(steps: Steps) -> None:
    answer = steps.finish(steps.request("answer", prompt(1)))
    blocks = steps.blocks(PROMPT_TOKENS + ANSWER_TOKENS)
    for count, token in enumerate(answer):
        again = Request(f"again-{count}", prompt(1) + answer[:count], blocks)
        steps.advance(again)
        assert again.answer == [token]


@pytest.mark.parametrize("num_tokens", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1])
def test_prompts_around_the_size_of_a_block(steps: Steps, num_tokens: int) -> None:
    answer = steps.finish(steps.request("answer", prompt(2, num_tokens)))
    cut = steps.request("cut", prompt(2, num_tokens) + answer[:10])
    assert steps.finish(cut)[: ANSWER_TOKENS - 10] == answer[10:]


def test_a_request_may_fill_the_model_length(steps: Steps) -> None:
    tokens = prompt(3, MAX_MODEL_TOKENS - ANSWER_TOKENS)
    request = steps.request("long", tokens)
    answer = steps.finish(request, MAX_BATCHED_TOKENS)
    assert len(request.tokens) == MAX_MODEL_TOKENS
    assert steps.finish(steps.request("again", tokens), 100) == answer


def test_a_step_may_have_the_most_sequences_and_tokens(steps: Steps) -> None:
    size = MAX_BATCHED_TOKENS // MAX_SEQUENCES
    short = SamplingParams(max_tokens=2, temperature=0.0)
    requests = [steps.request(f"r{n}", prompt(n, size), short) for n in range(MAX_SEQUENCES)]
    steps.advance(*requests)
    steps.advance(*requests)
    for number, request in enumerate(requests):
        blocks = Steps(steps.runner)
        alone = blocks.finish(blocks.request(f"alone-{number}", prompt(number, size), short))
        assert alone == request.answer


def test_a_request_continues_from_copied_blocks_under_another_name(steps: Steps) -> None:
    expected = steps.finish(steps.request("expected", prompt(1)))
    for num_before in (1, 5):
        source = steps.request(f"source-{num_before}", prompt(1))
        while len(source.answer) < num_before:
            steps.advance(source)
        target = Request(
            f"target-{num_before}", source.tokens, steps.move(source),
            num_computed=source.num_computed, num_prompt_tokens=PROMPT_TOKENS,
        )  # fmt: skip
        assert steps.finish(target) == expected


def test_a_paused_request_continues_in_its_blocks(steps: Steps) -> None:
    expected = steps.finish(steps.request("expected", prompt(1)))
    paused, other = steps.request("paused", prompt(1)), steps.request("other", prompt(2))
    while len(paused.answer) < 9:
        steps.advance(paused)
    for _ in range(4):
        steps.advance(other)
    assert steps.finish(paused) == expected


def test_a_paused_request_continues_in_other_blocks(steps: Steps) -> None:
    expected = steps.finish(steps.request("expected", prompt(1)))
    paused = steps.request("paused", prompt(1))
    while len(paused.answer) < 9:
        steps.advance(paused)
    paused.block_ids = steps.move(paused)
    assert steps.finish(paused) == expected


def test_a_preempted_request_is_computed_again_in_other_blocks(steps: Steps) -> None:
    expected = steps.finish(steps.request("expected", prompt(1)))
    preempted = steps.request("preempted", prompt(1))
    while len(preempted.answer) < 9:
        steps.advance(preempted)
    for block in preempted.block_ids:
        steps.runner.pool.tensor[block].zero_()
    preempted.block_ids = steps.blocks(PROMPT_TOKENS + ANSWER_TOKENS)
    preempted.num_computed = 0
    assert steps.finish(preempted, 50) == expected


def test_answers_do_not_depend_on_who_else_is_in_the_batch(steps: Steps) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    lengths = (5, 32, 40, 70)
    prompts = {f"r{n}": prompt(n, length) for n, length in enumerate(lengths)}
    alone = {
        name: steps.finish(steps.request(f"{name}-alone", tokens, sampling))
        for name, tokens in prompts.items()
    }
    again = Steps(steps.runner)
    batch = [again.request(name, tokens, sampling) for name, tokens in prompts.items()]
    chance = np.random.default_rng(8)
    while running := [each for each in batch if len(each.answer) < sampling.max_tokens]:
        count = int(chance.integers(1, len(running) + 1))
        chosen = chance.permutation(len(running))[:count].tolist()
        # Requests at different stages are in one batch: some still compute their prompts.
        again.advance(*[running[index] for index in chosen], max_tokens=20)
    assert {request.name: request.answer for request in batch} == alone


def test_blocks_are_copied_before_the_rows_are_computed(steps: Steps) -> None:
    shared = 40
    tails = {name: prompt(1, shared) + prompt(seed, 20) for name, seed in (("a", 7), ("b", 8))}
    expected = {
        name: steps.finish(steps.request(f"{name}-alone", tokens)) for name, tokens in tails.items()
    }
    first, second = (steps.request(name, tokens) for name, tokens in tails.items())
    steps.advance(first, max_tokens=shared)
    second.block_ids[0], second.num_computed = first.block_ids[0], shared
    steps.advance(first, second, copies=[(first.block_ids[1], second.block_ids[1])])
    assert steps.finish(first) == expected["a"]
    assert steps.finish(second) == expected["b"]


def test_no_other_block_is_written(steps: Steps) -> None:
    prefill, decode = steps.request("prefill", prompt(1)), steps.request("decode", prompt(2))
    steps.advance(decode)
    steps.advance(prefill, max_tokens=BLOCK_TOKENS)
    before = steps.runner.pool.tensor.clone()
    steps.advance(decode, prefill)
    after = steps.runner.pool.tensor
    changed = {n for n in range(NUM_BLOCKS) if not torch.equal(before[n], after[n])}
    # The first block of the one, and the first two of the other, are full.
    assert changed == {decode.block_ids[2], *prefill.block_ids[1:3]}


def test_the_next_plan_may_be_prepared_before_its_tokens_are_known(steps: Steps) -> None:
    expected = steps.finish(steps.request("expected", prompt(1)))
    request = steps.request("overlapped", prompt(1))
    executor = steps.runner.make_executor()
    try:
        executor.submit(Plan(1, (request.row(),)))
        for number in range(1, ANSWER_TOKENS):
            request.num_computed = len(request.tokens)
            request.tokens.append(UNKNOWN_TOKEN)
            executor.submit(Plan(number + 1, (request.row(previous_row_index=0),)))
            sampled = executor.collect().sampled[0]
            assert sampled is not None
            request.tokens[-1] = sampled.token_id
        last = executor.collect().sampled[0]
    finally:
        executor.close()
    assert last is not None
    assert [*request.answer, last.token_id] == expected


def test_compute_reports_its_start_once(steps: Steps) -> None:
    starts: list[None] = []
    plan = Plan(1, (steps.request("a", prompt(1)).row(),))
    steps.runner.compute(steps.runner.prepare(plan), lambda: starts.append(None))
    assert starts == [None]


def test_a_sampled_token_depends_on_seed_and_position_only(steps: Steps) -> None:
    alone = steps.finish(steps.request("alone", prompt(1), SEEDED))
    greedy = steps.finish(steps.request("greedy", prompt(1)))
    other_seed = SamplingParams(max_tokens=ANSWER_TOKENS, seed=12)
    same = steps.request("same", prompt(1), SEEDED)
    other = steps.request("other", prompt(1), other_seed)
    while len(same.answer) < ANSWER_TOKENS:
        steps.advance(other, same)
    assert same.answer == alone
    assert other.answer != alone and greedy != alone


def test_seeded_answers_continue_elsewhere(steps: Steps) -> None:
    expected = steps.finish(steps.request("expected", prompt(1), SEEDED))
    source = steps.request("source", prompt(1), SEEDED)
    while len(source.answer) < 6:
        steps.advance(source)
    target = Request(
        "target", source.tokens, steps.move(source), SEEDED, source.num_computed, PROMPT_TOKENS
    )
    assert steps.finish(target) == expected


def test_logprobs_are_the_models_and_only_where_wanted(steps: Steps) -> None:
    wanted = SamplingParams(max_tokens=4, temperature=1.0, seed=3, logprobs=VOCAB_SIZE)
    few = SamplingParams(max_tokens=4, temperature=0.0, logprobs=2)
    requests = [
        steps.request("none", prompt(5)),
        steps.request("all", prompt(6), wanted),
        steps.request("few", prompt(7), few),
    ]
    for _ in range(3):
        none, full, two = steps.advance(*requests).sampled
        assert none is not None and none.logprob is None
        assert full is not None and full.logprob is not None
        logprobs = dict(full.logprob.top)
        assert len(logprobs) == VOCAB_SIZE
        assert sum(math.exp(each) for each in logprobs.values()) == pytest.approx(1.0, abs=1e-4)
        assert full.logprob.token_id == full.token_id
        assert full.logprob.logprob == logprobs[full.token_id]
        assert two is not None and two.logprob is not None
        (best, first), (_, second) = two.logprob.top
        assert (best, first) == (two.token_id, two.logprob.logprob) and first >= second


@pytest.mark.parametrize("max_tokens", [None, 10])
def test_prompt_logprobs_are_those_of_the_same_tokens_in_an_answer(
    steps: Steps, max_tokens: int | None
) -> None:
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, logprobs=3)
    source = steps.request("source", prompt(1), sampling)
    answered: list[TokenLogprob] = []
    while len(source.answer) < ANSWER_TOKENS:
        sampled = steps.advance(source).sampled[0]
        assert sampled is not None and sampled.logprob is not None
        answered.append(sampled.logprob)
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=3)
    request = steps.request("scored", source.tokens, scored)
    other = steps.request("other", prompt(2))
    scores: list[TokenLogprob] = []
    while not request.answer:
        chunk = steps.advance(other, request, max_tokens=max_tokens).prompt_logprobs
        assert len(chunk) == 2 and chunk[0] == ()
        scores += chunk[1]
    assert [each.token_id for each in scores] == source.tokens[1:]
    tail = scores[PROMPT_TOKENS - 1 :]
    assert [each.logprob for each in tail] == approximately(answered)
    assert [[token for token, _ in each.top] for each in tail] == [
        [token for token, _ in each.top] for each in answered
    ]
    assert steps.advance(other).prompt_logprobs == ()


def test_prompt_logprobs_without_alternatives(steps: Steps) -> None:
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    scores = steps.advance(steps.request("a", prompt(1), scored)).prompt_logprobs[0]
    assert len(scores) == PROMPT_TOKENS - 1
    assert all(each.top == () and each.logprob < 0 for each in scores)


def test_a_mask_allows_only_its_tokens(steps: Steps) -> None:
    free = steps.request("free", prompt(1))
    masked = steps.request("masked", prompt(1), SEEDED)
    expected = steps.finish(steps.request("expected", prompt(1)))[:2]
    for allowed in ((9,), (500, 501, 502)):
        rows = (masked.row(mask=FixedMask(allow_only(*allowed)).mask), free.row())
        first, second = steps.run(*rows).sampled
        assert first is not None and first.token_id in allowed
        assert second is not None
        for request, row, token in zip((masked, free), rows, (first, second), strict=True):
            request.num_computed = row.context_tokens
            request.tokens.append(token.token_id)
    assert free.answer == expected


def test_a_mask_that_allows_nothing_fails_its_row_alone(steps: Steps) -> None:
    expected = steps.finish(steps.request("expected", prompt(1)))
    stuck, free = steps.request("stuck", prompt(2)), steps.request("free", prompt(1))
    nothing, token = steps.run(stuck.row(mask=FixedMask(NO_TOKEN).mask), free.row()).sampled
    assert nothing is None
    assert token is not None and token.token_id == expected[0]
    free.num_computed = len(free.tokens)
    free.tokens.append(token.token_id)
    assert steps.finish(free) == expected


def test_suppressed_tokens_are_not_sampled(steps: Steps) -> None:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3)
    request = steps.request("a", prompt(1), sampling)
    best = steps.run(request.row()).sampled[0]
    assert best is not None and best.logprob is not None
    ranked = [token for token, _ in best.logprob.top]
    row = request.row(suppressed_token_ids=(ranked[0], TokenId(VOCAB_SIZE + 5)))
    second = steps.run(row).sampled[0]
    assert second is not None and second.token_id == ranked[1]


def test_presence_and_frequency_penalties_count_the_answer(steps: Steps) -> None:
    sampling = SamplingParams(
        max_tokens=6, temperature=0.0, presence_penalty=100.0, frequency_penalty=100.0,
        logit_bias=((TokenId(77), 10_050.0), (TokenId(78), 10_000.0)),
    )  # fmt: skip
    request = steps.request("a", [77, 77, *prompt(1)], sampling)
    other = steps.request("b", prompt(2))
    for _ in range(6):
        steps.advance(other, request)
    # The model's own logits differ by far less than 50.
    assert request.answer == [77, 78, 77, 78, 77, 78]


def test_repetition_penalty_counts_prompt_and_answer(steps: Steps) -> None:
    tokens = np.random.default_rng(9).permutation(VOCAB_SIZE)[:300].tolist()
    plain = steps.request("plain", tokens)
    assert set(steps.finish(plain, MAX_BATCHED_TOKENS)) & set(tokens)
    penalty = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, repetition_penalty=1e6)
    answer = steps.finish(steps.request("penalised", tokens, penalty), MAX_BATCHED_TOKENS)
    assert len(set(answer) - set(tokens)) == ANSWER_TOKENS


def test_kv_can_be_exchanged_iff_layout_and_digest_are_equal(model: Path, tmp_path: Path) -> None:
    def identity(path: Path, **changes: object) -> tuple[str, bytes]:
        runner = ModelRunner.load(path, runner_options(**changes))
        return runner.kv_layout, runner.model_digest

    first = identity(model)
    assert identity(model, num_blocks=9) == first
    others = {
        identity(model, dtype="bfloat16"),
        identity(model, block_tokens=64),
        identity(make_model(tmp_path, ARCHITECTURE, seed=2)),
    }
    assert len(others) == 3 and first not in others
