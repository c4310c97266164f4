"""Validation of requests: rejects those that an engine could never serve."""

import math
from collections.abc import Sequence

from baton.core.attention_window import AttentionWindow
from baton.core.ids import TokenId
from baton.core.request import MAX_LOGPROBS, RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.constraint import Constraint, IsolatedConstraint
from baton.errors import CONTEXT_LENGTH_EXCEEDED, Invalid, context_length_message


def validate_spec(spec: RequestSpec, task: Task, config: EngineConfig, num_blocks: int) -> None:
    """Raise Invalid when the request could never be served."""
    num_tokens = len(spec.token_ids)
    if not 1 <= spec.num_prompt_tokens <= num_tokens:
        raise Invalid(
            f"num_prompt_tokens is {spec.num_prompt_tokens}; it must be between 1 and the "
            f"number of token_ids ({num_tokens})",
            param="prompt",
        )
    if spec.max_new_tokens < 1:
        raise Invalid(
            f"max_tokens is {spec.sampling.max_tokens}, and {spec.num_emitted_tokens} tokens "
            "were already sent: there is nothing left to generate",
            param="max_tokens",
        )
    if num_tokens + spec.max_new_tokens > config.max_model_tokens:
        raise Invalid(
            context_length_message(
                config.max_model_tokens,
                f"the request has {num_tokens} tokens and may generate {spec.max_new_tokens}",
            ),
            param="max_tokens",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    validate_sampling(spec.sampling, config)
    _validate_attention_window(spec.attention_window, config)
    window = config.window_of(spec.attention_window)
    needed = config.max_blocks_for(max_kv_tokens(spec, task), window)
    if needed > num_blocks:
        raise Invalid(
            context_length_message(
                config.max_model_tokens,
                f"the request needs {needed} KV blocks, but the worker has only {num_blocks}",
            ),
            param="max_tokens",
            code=CONTEXT_LENGTH_EXCEEDED,
        )


def _validate_attention_window(window: AttentionWindow | None, config: EngineConfig) -> None:
    if window is None:
        return
    if config.window_tokens is not None or not config.supports_attention_window:
        reason = "layers of the model have sliding windows of their own"
        if config.window_tokens is None:
            reason = "the worker's engine does not support it"
        raise Invalid(f"attention_window is not possible: {reason}", param="attention_window")
    assert window.is_valid, window


def validate_tokens(token_ids: Sequence[TokenId], config: EngineConfig) -> None:
    """Raise Invalid for a token id outside the vocabulary, whose lookup would crash the worker."""
    size = config.vocab_size
    if size and token_ids and not 0 <= min(token_ids) <= max(token_ids) < size:
        raise Invalid(f"token ids must be between 0 and {size - 1}", param="token_ids")


def validate_sampling(sampling: SamplingParams, config: EngineConfig) -> None:
    """Raise Invalid for values that no sampler can compute with. Routers check more strictly."""
    for name in _NUMBERS:
        if not math.isfinite(getattr(sampling, name)):
            raise Invalid(f"{name} is {getattr(sampling, name)}, and must be finite", param=name)
    for name in ("temperature", "top_k"):
        if getattr(sampling, name) < 0:
            raise Invalid(
                f"{name} is {getattr(sampling, name)}, and must be at least 0", param="sampling"
            )
    if sampling.repetition_penalty <= 0:
        raise Invalid(
            f"repetition_penalty is {sampling.repetition_penalty}, and must be above 0",
            param="sampling",
        )
    if not all(math.isfinite(bias) for _, bias in sampling.logit_bias):
        raise Invalid("every logit_bias must be finite", param="logit_bias")
    if (sampling.logprobs or 0) > MAX_LOGPROBS or (sampling.prompt_logprobs or 0) > MAX_LOGPROBS:
        raise Invalid(
            f"logprobs and prompt_logprobs must be at most {MAX_LOGPROBS}", param="logprobs"
        )
    validate_tokens([token_id for token_id, _ in sampling.logit_bias], config)
    validate_tokens(sampling.stop_token_ids, config)


_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def isolate_constraint(spec: RequestSpec, constraint: Constraint | None) -> Constraint | None:
    """Wrap the request's constraint in an :class:`IsolatedConstraint`. Return None if the request
    has no grammar; raises Invalid if it has a grammar but no constraint that enforces it."""
    if constraint is not None:
        return IsolatedConstraint(constraint)
    if spec.sampling.grammar is not None:
        raise Invalid(
            "this worker does not support answers constrained by a grammar (response_format)",
            param="response_format",
        )
    return None


def max_kv_tokens(spec: RequestSpec, task: Task) -> int:
    """Return the maximum number of tokens whose KV the request may need. Its last token is sampled,
    but no KV is computed for it."""
    growth = 0 if task is Task.PREFILL else spec.max_new_tokens - 1
    return len(spec.token_ids) + growth
