"""Request fields about sampling, which all APIs have in common."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from baton.core.attention_window import MAX_WINDOW_TOKENS, AttentionWindow
from router.serving.schema.strict_model import (
    INTEGRAL,
    TOKEN_ID,
    StrictModel,
    field_validation_error,
    validation_error,
)

DEFAULT_SINK_TOKENS = 4
"""With fewer sink tokens models lose quality, and more help little (Xiao et al., ICLR 2024, table
2)."""


class AttentionWindowField(StrictModel):
    """Which tokens of its context each token attends to: the first ``sink_tokens`` tokens of the
    prompt, and the last ``recent_tokens`` tokens, its own included."""

    sink_tokens: Annotated[int, Field(ge=0, le=MAX_WINDOW_TOKENS), INTEGRAL] = DEFAULT_SINK_TOKENS
    recent_tokens: Annotated[int, Field(ge=1, le=MAX_WINDOW_TOKENS), INTEGRAL]

    @property
    def window(self) -> AttentionWindow:
        return AttentionWindow(self.sink_tokens, self.recent_tokens)


MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 256
MAX_BIASES = 1024

RANDOM_SEED = -1
"""The seed that means a random one, as in vLLM."""

Penalty = Annotated[float, Field(gt=0, le=10)]
StopTokenIds = Annotated[
    list[Annotated[int, TOKEN_ID]], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)
]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _to_stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise validation_error("the value must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise validation_error(f"a request may have at most {MAX_STOPS} stop strings")
    if not all(len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise validation_error(f"a stop string must have at most {MAX_STOP_CHARACTERS} characters")
    return [stop for stop in stops if stop]


class SamplingFields(StrictModel):
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: Annotated[list[str], BeforeValidator(_to_stops)] = Field(default_factory=list)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), INTEGRAL] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    # Not in OpenAI's API
    top_k: Annotated[int, Field(ge=-1, lt=2**31), INTEGRAL] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Penalty | None = None
    repeat_penalty: Penalty | None = None
    """The name of ``repetition_penalty`` in Ollama and llama.cpp, which Open WebUI sends."""
    ignore_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Has no effect: none of the supported tokenizers puts spaces between special tokens."""
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Field(ge=0), INTEGRAL] | None = None
    priority: Annotated[int, Field(ge=0, lt=2**31), INTEGRAL] | None = None
    """How many steps the request's priority is below its tenant's priority; it can't be above
    it."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Separates the request's cached prefixes from the tenant's other cached prefixes."""
    exact_kv: bool | None = None
    """Whether no lossy codec may be applied to the request's KV."""
    attention_window: AttentionWindowField | None = None
    """Limits which tokens attend to which, so that a long context needs little memory."""

    @model_validator(mode="after")
    def _take_repeat_penalty(self) -> Self:
        if self.repeat_penalty is None:
            return self
        if self.repetition_penalty not in (None, self.repeat_penalty):
            raise field_validation_error(
                "repeat_penalty",
                "repeat_penalty and repetition_penalty differ; give only one of them",
            )
        self.repetition_penalty = self.repeat_penalty
        return self

    @property
    def wants_random_seed(self) -> bool:
        return self.seed is None or self.seed == RANDOM_SEED
