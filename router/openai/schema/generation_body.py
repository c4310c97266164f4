"""The request fields that chats and completions have in common."""

from abc import ABC, abstractmethod
from typing import Annotated, Self

from pydantic import Field, model_validator

from baton.core.request import MAX_LOGPROBS
from router.openai.schema.response_format import ResponseFormatFields
from router.openai.schema.sampling_fields import SamplingFields
from router.openai.schema.strict_model import StrictModel, field_validation_error

MAX_CHOICES = 16


class StreamOptions(StrictModel):
    """Options of streams. ``include_obfuscation`` hides the lengths of tokens from observers of the
    encrypted traffic; unlike in OpenAI's API, it is off by default. ``continuous_usage_stats`` is
    vLLM's, and, as in vLLM, needs ``include_usage``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(ResponseFormatFields, SamplingFields, ABC):
    """The common request fields, with OpenAI's defaults."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Not in OpenAI's API
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """The number of alternatives (likeliest tokens) to return for each token of the prompt."""

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise field_validation_error(
                "stream_options", "stream_options is only allowed with stream"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise field_validation_error(
                "prompt_logprobs", "prompt_logprobs is not allowed with stream"
            )
        if self.min_tokens and self.format is not None:
            raise field_validation_error(
                "min_tokens", "min_tokens is not allowed with a response format"
            )
        return self

    @property
    def num_choices(self) -> int:
        """The number of answers per prompt that the client gets."""
        return self.n or 1

    @property
    def num_candidates(self) -> int:
        """The number of answers per prompt that are generated."""
        return self.num_choices

    @property
    def requested_tokens(self) -> int | None:
        """The client's limit on the answer's tokens, or None if it set no limit."""
        return self.max_tokens

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """The number of alternatives for each token of the answer; None for no logprobs."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The number of alternatives for each token of the prompt; None for no logprobs."""
        return self.prompt_logprobs

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        options = self.stream_options if self.wants_usage_chunk else None
        return options is not None and bool(options.continuous_usage_stats)

    @property
    def wants_obfuscation(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_obfuscation)
