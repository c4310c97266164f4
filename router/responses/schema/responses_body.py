"""The body of POST /v1/responses."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from baton.core.request import MAX_LOGPROBS
from router.http.unknown_fields import UnsupportedField
from router.openai.schema.chat_hints import Metadata, Note
from router.openai.schema.response_format import StructuredOutputs
from router.openai.schema.sampling_fields import SamplingFields
from router.openai.schema.strict_model import (
    INTEGRAL,
    StrictModel,
    field_validation_error,
    ignored_unless,
    unsupported_field,
)
from router.responses.schema.input_tokens_body import InputTokensBody
from router.responses.schema.unsupported_fields import UNSUPPORTED_FIELDS

INCLUDE_ENCRYPTED_REASONING = "reasoning.encrypted_content"
INCLUDE_LOGPROBS = "message.output_text.logprobs"

Includable = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    # Outputs of tools that Baton does not have, so that there is never anything to include
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponseStreamOptions(StrictModel):
    """Options of streams. ``include_obfuscation`` is off by default, unlike in OpenAI's API."""

    include_obfuscation: bool | None = None


class ResponsesBody(InputTokensBody, SamplingFields):
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = UNSUPPORTED_FIELDS

    max_output_tokens: Annotated[int, Field(ge=1), INTEGRAL] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    include: Annotated[list[Includable], Field(max_length=16, fail_fast=True)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), INTEGRAL] | None = None
    metadata: Metadata | None = None
    # Fields that don't change what is generated
    prompt_cache_key: Note | None = None
    prompt_cache_retention: Annotated[str | None, ignored_unless("in_memory")] = None
    prompt_cache_options: Annotated[Any, ignored_unless()] = None
    service_tier: Annotated[str | None, ignored_unless("auto", "default")] = None
    user: Note | None = None
    safety_identifier: Note | None = None
    max_tool_calls: Annotated[int, Field(ge=0)] | None = None
    client_metadata: dict[str, Any] | None = None
    image: dict[str, Any] | None = None
    access_programs: dict[str, Any] | None = None
    # Fields of features that Baton lacks
    prompt: Annotated[
        Any, unsupported_field("there are no prompt templates; send instructions and input")
    ] = None
    context_management: Annotated[
        Any, unsupported_field("the input is never compacted or shortened")
    ] = None
    moderation: Annotated[Any, unsupported_field("there is no moderation")] = None
    # Not in OpenAI's API
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise field_validation_error(
                "stream_options", "stream_options is only allowed with stream"
            )
        return self

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives for each token of the text; None for no logprobs."""
        if self.top_logprobs is None and INCLUDE_LOGPROBS not in (self.include or ()):
            return None
        return self.top_logprobs or 0

    @property
    def includes_encrypted_reasoning(self) -> bool:
        return INCLUDE_ENCRYPTED_REASONING in (self.include or ())
