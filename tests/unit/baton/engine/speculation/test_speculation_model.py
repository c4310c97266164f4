"""Tests that speculative decoding does not change the model's outputs: tokens, logprobs, finish
reasons, with every kind of sampling and with grammars."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from baton.clock import SystemClock
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import FinishReason, RequestSpec, SamplingParams, TokenLogprob
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.executor import ThreadedExecutor
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from baton.engine.speculation.draft_model import DraftModelSource
from baton.engine.speculation.draft_source import DraftSource
from testkit.model_zoo import make_model
from tests.byte_grammars import byte_grammars, choice, regex, schema
from tests.drafting import OracleSource, draft_always
from tests.unit.baton.engine.native_helpers import needs_kernels
from tests.unit.baton.engine.test_overlap_model import SEED, requests

GRAMMARS = [
    regex("[a-c]{5,40}(xyz){1,9}"),
    choice("the quick brown fox", "the quick brown dog", "something else"),
    schema({"type": "array", "items": {"enum": ["ab", "abc"]}, "minItems": 2, "maxItems": 6}),
]


@dataclass
class Answer:
    """All outputs of a request, joined."""

    tokens: tuple[TokenId, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    num_outputs: int = 0


@dataclass(frozen=True)
class Run:
    """How requests are run. ``drafts``: none, from n-grams, from the known answers, or from a draft
    model, which is the model itself or another one."""

    drafts: str = "none"
    budget: int = 48
    chunk: int | None = None
    overlaps: bool = False


PLAIN = Run()
RUNS = [
    Run("ngram"),
    Run("ngram", budget=20, chunk=7, overlaps=True),
    Run("oracle"),
    Run("oracle", overlaps=True),
    Run("oracle", budget=17, chunk=5),
    Run("itself"),
    Run("another", overlaps=True),
]


def answers(
    runner: ModelRunner,
    specs: Sequence[RequestSpec],
    run: Run,
    known: dict[RequestId, Answer],
    draft_models: dict[str, ModelRunner],
) -> dict[RequestId, Answer]:
    """Run the requests, which arrive in different steps; return their answers."""
    source: DraftSource | None = None
    if run.drafts == "oracle":
        source = OracleSource(lambda spec: known[spec.request_id].tokens, 512, SEED)
    elif run.drafts in draft_models:
        source = DraftModelSource(draft_models[run.drafts], 256)
    config = EngineConfig(
        block_tokens=16,
        max_model_tokens=256,
        max_batched_tokens=run.budget,
        chunk_tokens=run.chunk,
        max_sequences=10,
        speculation=run.drafts != "none",
    )
    engine = Engine(
        runner,
        config,
        model_digest=repr(run).encode(),
        kv_dtype=runner.kv_dtype,
        eos_token_ids=frozenset({TokenId(255)}),
        clock=SystemClock(),
        executor=ThreadedExecutor(runner) if run.overlaps else None,
        draft_source=source,
    )
    if config.speculation:
        draft_always(engine)
    grammars = byte_grammars()
    found = {spec.request_id: Answer() for spec in specs}
    number = 0
    while engine.has_work() or number < len(specs):
        if number < len(specs):
            spec = specs[number]
            grammar = spec.sampling.grammar
            constraint = grammars.create(grammar) if grammar else None
            engine.add(spec, Task.PREFILL_AND_DECODE, constraint)
        number += 1
        for output in engine.step().outputs:
            answer = found[output.request_id]
            assert output.first_index == len(answer.tokens)
            answer.tokens += output.token_ids
            answer.logprobs += output.logprobs
            answer.finish_reason = output.finish_reason
            answer.num_outputs += 1
        engine.check_integrity()
    stats = engine.stats()
    assert (stats.num_drafted_tokens > 0) == config.speculation
    if run.drafts not in ("none", "another"):  # another model is hardly ever right
        assert stats.num_accepted_tokens > 0
    engine.close()
    return found


def with_grammars(vocab_size: int) -> list[RequestSpec]:
    specs = []
    for index in range(12):
        sampling = SamplingParams(
            max_tokens=40,
            temperature=[0.0, 1.0][index % 2],
            seed=index,
            grammar=GRAMMARS[index % len(GRAMMARS)],
            repetition_penalty=[1.0, 1.3][index % 2],
            logprobs=[None, 2][index % 2],
        )
        tokens = tuple(TokenId((index * 31 + n * 7) % vocab_size) for n in range(3 + 5 * index))
        specs.append(RequestSpec(RequestId(f"g{index}"), Epoch(1), tokens, len(tokens), sampling))
    return specs


def as_received(answer: Answer) -> Answer:
    return replace(answer, num_outputs=0)


@needs_kernels
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("llama3-rope", "float32"), ("qwen3", "bfloat16"), ("qwen3-moe", "bfloat16")],
)
def test_drafts_do_not_change_tokens_and_logprobs(
    architecture: str, dtype: str, tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    make_model(tmp_path, architecture, seed=SEED)
    runner = ModelRunner.load(
        tmp_path, RunnerOptions(device="cpu", dtype=dtype, num_blocks=80, cpu_kernels="on")
    )
    chance = np.random.default_rng(SEED)
    specs = [*requests(chance, 512), *with_grammars(512)]
    make_model(tmp_path / "another", architecture, seed=SEED + 1)
    options = RunnerOptions(device="cpu", dtype=dtype, num_blocks=40, block_tokens=8)
    draft_models = {
        "itself": ModelRunner.load(tmp_path, options),
        "another": ModelRunner.load(tmp_path / "another", options),
    }
    expected = answers(runner, specs, PLAIN, {}, draft_models)
    assert all(each.finish_reason is not None for each in expected.values())
    for run in RUNS:
        found = answers(runner, specs, run, expected, draft_models)
        for name, answer in found.items():
            assert as_received(answer) == as_received(expected[name]), (run, name)
        if run.drafts in ("oracle", "itself"):
            assert any(each.num_outputs < len(each.tokens) for each in found.values())
        if run.drafts == "oracle":
            assert any(
                each.num_outputs < len(each.tokens)
                for name, each in found.items()
                if name.startswith("g")
            )
