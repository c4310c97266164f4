"""``baton generate`` runs the engine alone, in one process, without a cluster."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from baton.checkpoints.hub import resolve_model
from baton.clock import SystemClock
from baton.config import Settings
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.runner import ModelRunner
from baton.errors import Invalid
from baton.text.grammar.matcher import GrammarCompiler
from baton.text.tokenizer import Tokenizer
from baton.worker.engine_settings import runner_options


@dataclass
class GeneratedAnswer:
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""


def run_generate(
    settings: Settings, prompts: Sequence[str], sampling: SamplingParams, as_json: bool
) -> None:
    """Print one answer per prompt, in the order of the prompts. Raises Invalid."""
    path = resolve_model(settings.model)
    tokenizer = Tokenizer.load(path, uses_fast_encoder=False)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    runner = ModelRunner.load(
        path,
        runner_options(settings),
    )
    grammars = None
    if sampling.grammar is not None:
        tokens = [TokenId(token) for token in runner.model_config.eos_token_ids]
        grammars = GrammarCompiler.load(path, runner.model_config.vocab_size, tokens)
    for answer in generate(runner, settings, encoded, sampling, grammars):
        answer.text = tokenizer.decode(answer.token_ids)
        print(json.dumps(asdict(answer)) if as_json else answer.text)


def generate(
    runner: ModelRunner,
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    grammars: GrammarCompiler | None = None,
) -> list[GeneratedAnswer]:
    """Generate the answers to all prompts in one batch, and return them in the order of the
    prompts. Raises Invalid for a request that the engine refuses."""
    engine = Engine(
        runner,
        engine_config(settings, runner, len(prompts)),
        model_digest=runner.model_digest,
        kv_dtype=runner.kv_dtype,
        eos_token_ids=frozenset(TokenId(token) for token in runner.model_config.eos_token_ids),
        clock=SystemClock(),
    )
    answers = {RequestId(str(n)): GeneratedAnswer([*prompt]) for n, prompt in enumerate(prompts)}
    for request_id, answer in answers.items():
        tokens = tuple(TokenId(token) for token in answer.prompt_token_ids)
        spec = RequestSpec(request_id, Epoch(1), tokens, len(tokens), sampling)
        constraint = grammars.create(sampling.grammar) if grammars and sampling.grammar else None
        engine.add(spec, Task.PREFILL_AND_DECODE, constraint)
    while engine.has_work():
        for output in engine.step().outputs:
            answer = answers[output.request_id]
            answer.token_ids.extend(output.token_ids)
            answer.finish_reason = output.finish_reason.value if output.finish_reason else ""
            if output.error:
                raise Invalid(output.error)
    return list(answers.values())


def engine_config(settings: Settings, runner: ModelRunner, num_prompts: int) -> EngineConfig:
    limit = runner.model_config.max_position_embeddings
    return EngineConfig(
        block_tokens=settings.block_tokens,
        max_batched_tokens=settings.max_batched_tokens,
        chunk_tokens=settings.chunk_tokens,
        max_sequences=settings.max_sequences,
        max_waiting=max(settings.max_waiting, num_prompts),
        max_model_tokens=min(settings.max_model_tokens or limit, limit),
        window_tokens=runner.limits.kv_window_tokens,
        num_full_groups=runner.limits.num_full_groups,
        num_windowed_groups=runner.limits.num_windowed_groups,
    )
