"""``baton generate``: the engine alone, one process, no cluster."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.checkpoint import resolve_model
from baton.clock import SystemClock
from baton.config import Settings
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import FinishReason, RequestOutput, RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.runner import ModelRunner
from baton.errors import Invalid
from baton.text.tokenizer import Tokenizer


@dataclass
class Answer:
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""


def run_generate(
    settings: Settings, prompts: Sequence[str], sampling: SamplingParams, as_json: bool
) -> None:
    """Prints one answer per prompt. Raises Invalid."""
    if not prompts:
        raise Invalid("generate needs --prompt TEXT or --prompt-file FILE")
    if sampling.max_tokens < 1:
        raise Invalid(f"--max-tokens is {sampling.max_tokens}, and must be at least 1")
    path = resolve_model(settings.model)
    tokenizer = Tokenizer.load(path)
    runner = ModelRunner.load(
        path,
        device=settings.device,
        dtype=settings.dtype,
        num_blocks=settings.num_blocks,
        pool_bytes=settings.pool_bytes,
        block_tokens=settings.block_tokens,
    )
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    answers = generate(runner, settings, encoded, sampling)
    for answer in answers:
        answer.text = tokenizer.decode(answer.token_ids)
        print(json.dumps(vars(answer)) if as_json else answer.text)


def generate(
    runner: ModelRunner,
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
) -> list[Answer]:
    """All prompts in one batch; prompt i has seed ``sampling.seed`` + i."""
    engine = Engine(
        runner,
        engine_config(settings, runner),
        model_digest=runner.model_digest,
        kv_dtype=runner.kv_dtype,
        eos_token_ids=frozenset(TokenId(token) for token in runner.model_config.eos_token_ids),
        clock=SystemClock(),
    )
    answers = {}
    for number, prompt in enumerate(prompts):
        request_id = RequestId(str(number))
        answers[request_id] = Answer([*prompt])
        engine.add(
            RequestSpec(
                request_id,
                Epoch(1),
                tuple(TokenId(token) for token in prompt),
                len(prompt),
                replace(sampling, seed=sampling.seed + number),
            ),
            Task.WHOLE,
        )
    while engine.has_work():
        for output in engine.step().outputs:
            _take(answers[output.request_id], output)
    return list(answers.values())


def engine_config(settings: Settings, runner: ModelRunner) -> EngineConfig:
    limit = runner.model_config.max_position_embeddings
    return EngineConfig(
        block_tokens=settings.block_tokens,
        max_step_tokens=settings.max_step_tokens,
        chunk_tokens=settings.chunk_tokens,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        max_model_tokens=min(settings.max_model_tokens or limit, limit),
    )


def _take(answer: Answer, output: RequestOutput) -> None:
    answer.token_ids.extend(output.token_ids)
    if output.finish_reason is not None:
        answer.finish_reason = FinishReason(output.finish_reason).value
