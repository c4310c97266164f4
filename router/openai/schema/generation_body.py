"""The request fields that chats and completions have in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from baton.core.request import MAX_LOGPROBS
from baton.text.grammar.limits import MAX_ALLOWED_TOKENS
from router.http.unknown_fields import UnsupportedField
from router.limits import MAX_CHOICES
from router.serving.schema.response_format import ResponseFormatFields
from router.serving.schema.sampling_fields import SamplingFields
from router.serving.schema.strict_model import (
    INTEGRAL,
    TOKEN_ID,
    RequestBody,
    StrictModel,
    field_validation_error,
    validation_error,
)
from router.serving.schema.unsupported_fields import UNSUPPORTED_FIELDS

MAX_ANSWERS = 1024
"""The maximum number of answers that are generated for all prompts of a request together. Each
answer needs a task and a stream to a worker."""

MAX_BAD_WORDS = 256

BadWord = Annotated[str, Field(pattern=r"\S", max_length=256)]


def _check_truncation(value: int) -> int:
    if value == 0:
        raise validation_error("the value must be -1 or at least 1")
    return value


class StreamOptions(StrictModel):
    """Options of streams. ``include_obfuscation`` hides the lengths of tokens from observers of the
    encrypted traffic; unlike in OpenAI's API, it is off by default. ``continuous_usage_stats`` is
    vLLM's extension; as in vLLM, it has an effect only with ``include_usage``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(RequestBody, ResponseFormatFields, SamplingFields, ABC):
    """The common request fields, with OpenAI's defaults."""

    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = UNSUPPORTED_FIELDS

    max_tokens: Annotated[int, Field(ge=1), INTEGRAL] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), INTEGRAL] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Not in OpenAI's API
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: (
        Annotated[int, Field(ge=-1), AfterValidator(_check_truncation), INTEGRAL] | None
    ) = None
    """Keep only this many tokens at the end of the prompt; -1: as many as the model allows."""
    return_tokens_as_token_ids: bool | None = None
    """In logprobs, write tokens as ``token_id:5``."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), INTEGRAL] | None = None
    """The number of alternatives (likeliest tokens) to return for each token of the prompt."""
    allowed_token_ids: (
        Annotated[
            list[Annotated[int, TOKEN_ID]],
            Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True),
        ]
        | None
    ) = None
    """The only tokens that the answer may have."""
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = (
        None
    )
    """Words that the answer must not contain."""

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
        return self

    @property
    def num_choices(self) -> int:
        """The number of answers per prompt that the client gets."""
        return self.n or 1

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """The number of alternatives for each token of the answer; None for no logprobs."""

    def _request_fields(self) -> dict[str, Any]:
        """Return the fields of a :class:`GenerationRequest` that mean the same in all bodies."""
        return {
            "sampling": self,
            "format": self.format,
            "stream": bool(self.stream),
            "num_logprobs": self.num_logprobs,
            "num_choices": self.num_choices,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": self.bad_words,
            "return_token_ids": bool(self.return_token_ids),
            "reports_running_usage": self.wants_running_usage,
        }

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
