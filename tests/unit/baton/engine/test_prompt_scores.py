"""Tests that logprobs of prompts equal transformers', whatever the chunking and the cache."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.clock import ManualClock
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestOutput, RequestSpec, SamplingParams, TokenLogprob
from baton.core.task import Task
from baton.engine import prompt_logprobs
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.plan import Runner
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from testkit.fakes.runner import FakeRunner
from testkit.model_zoo import make_model

SEED = 20261121
LENGTHS = [1, 2, 16, 17, 65, 130]


def engine_over(runner: Runner, chunk: int) -> Engine:
    config = EngineConfig(
        block_tokens=runner.block_tokens,
        max_model_tokens=256,
        max_batched_tokens=2 * chunk,
        chunk_tokens=chunk,
        growth_tokens=1,
        watermark_blocks=0,
    )
    return Engine(
        runner,
        config,
        model_digest=b"model",
        kv_dtype="float32",
        eos_token_ids=frozenset(),
        clock=ManualClock(),
    )


def spec_of(
    name: str, prompt: Sequence[int], num_top: int | None, max_tokens: int = 2
) -> RequestSpec:
    tokens = tuple(map(TokenId, prompt))
    sampling = SamplingParams(max_tokens, temperature=0.0, prompt_logprobs=num_top)
    return RequestSpec(RequestId(name), Epoch(1), tokens, len(tokens), sampling)


def run(engine: Engine, specs: Sequence[RequestSpec]) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {spec.request_id: [] for spec in specs}
    for spec in specs:
        engine.add(spec, Task.PREFILL_AND_DECODE)
    while engine.has_work():
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
        engine.check_integrity()
    return outputs


def scores_of(outputs: Sequence[RequestOutput]) -> tuple[TokenLogprob, ...]:
    """Return the prompt logprobs, which must come with the first output only."""
    assert not any(output.prompt_logprobs for output in outputs[1:])
    assert outputs[0].cached_tokens == 0
    return outputs[0].prompt_logprobs


@pytest.mark.parametrize("chunk", [16, 48, 256])
def test_prompt_logprobs_equal_those_of_transformers(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "LOGITS_CHUNK_TOKENS", 7)
    make_model(tmp_path, "qwen3", seed=SEED)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    chance = np.random.default_rng(SEED)
    prompts = [chance.integers(3, 500, size=length).tolist() for length in LENGTHS]
    runner = ModelRunner.load(tmp_path, RunnerOptions(device="cpu", num_blocks=128))
    engine = engine_over(runner, chunk)
    specs = [spec_of(str(n), prompt, 3) for n, prompt in enumerate(prompts)]
    for outputs in (run(engine, specs), run(engine, specs)):  # with an empty and a filled cache
        for number, prompt in enumerate(prompts):
            with torch.inference_mode():
                own = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
            scores = scores_of(outputs[str(number)])
            assert [score.token_id for score in scores] == prompt[1:]
            for position, score in enumerate(scores):
                assert score.logprob == pytest.approx(
                    float(own[position, score.token_id]), abs=2e-4
                )
                values, tokens = own[position].topk(3)
                assert [token for token, _ in score.top] == tokens.tolist()
                assert [v for _, v in score.top] == pytest.approx(values.tolist(), abs=2e-4)


@pytest.mark.parametrize("chunk", [4, 16])
def test_prompt_logprobs_do_not_depend_on_other_requests_or_preemption(chunk: int) -> None:
    """Blocks have four tokens, prompts share prefixes, and there are too few blocks for all
    requests, so that some are preempted and start again."""
    chance = np.random.default_rng(SEED)
    head = chance.integers(0, 256, size=24).tolist()
    prompts = [head[: 4 * n] + chance.integers(0, 256, size=9).tolist() for n in range(6)]
    specs = [spec_of(str(n), prompt, 0, max_tokens=20) for n, prompt in enumerate(prompts)]
    alone = [run(engine_over(FakeRunner(128, 4), chunk), [spec])[spec.request_id] for spec in specs]
    engine = engine_over(FakeRunner(24, 4), chunk)
    together = run(engine, specs)
    assert engine.stats().num_preemptions > 0
    for spec, outputs in zip(specs, alone, strict=True):
        scores = scores_of(outputs)
        assert [score.token_id for score in scores] == list(spec.token_ids[1:])
        assert scores_of(together[spec.request_id]) == scores


def test_scored_prompt_reuses_no_cache_but_fills_it() -> None:
    engine = engine_over(FakeRunner(64, 4), 16)
    prompt = list(range(30))
    plain, scored = spec_of("a", prompt, None), spec_of("b", prompt, 0)
    assert not run(engine, [plain])["a"][0].prompt_logprobs
    assert len(scores_of(run(engine, [scored])["b"])) == 29
    again = run(engine, [replace(plain, request_id=RequestId("c"))])["c"][0]
    assert again.cached_tokens == 29 // 4 * 4


def test_concurrent_requests_with_the_same_prompt() -> None:
    """Three requests have the same prompt. Neither of the two that ask for prompt logprobs waits
    for the blocks of the other one."""
    engine = engine_over(FakeRunner(64, 4), 8)
    prompt = list(range(40))
    specs = [spec_of("a", prompt, 0), spec_of("b", prompt, 0), spec_of("c", prompt, None)]
    outputs = run(engine, specs)
    assert scores_of(outputs["a"]) == scores_of(outputs["b"])
    assert {each[0].token_ids for each in outputs.values()} == {outputs["a"][0].token_ids}


def test_failover_does_not_repeat_prompt_logprobs() -> None:
    spec = spec_of("a", list(range(10)), 0)
    engine = engine_over(FakeRunner(64, 4), 8)
    first = run(engine, [spec])["a"]
    token = first[0].token_ids[0]
    later = replace(spec, token_ids=(*spec.token_ids, token), epoch=Epoch(2))
    (output,) = run(engine, [later])["a"]
    assert output.token_ids == first[1].token_ids
    assert output.prompt_logprobs == ()
