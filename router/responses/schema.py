"""Request bodies of the Responses API, with the sampling fields that all APIs have in common.

The items of ``input`` are validated only when :mod:`router.responses.chat_request` converts them,
and the tools only when :mod:`router.responses.tools` reads them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from baton.core.grammar import Grammar, GrammarKind
from baton.core.request import MAX_LOGPROBS
from router.http.unknown_fields import UnsupportedField
from router.openai.schema.chat_hints import Metadata, Note
from router.serving.schema import unsupported_fields as chat
from router.serving.schema.response_format import SchemaName, StructuredOutputs, json_schema_grammar
from router.serving.schema.sampling_fields import SamplingFields
from router.serving.schema.strict_model import (
    INTEGRAL,
    RequestBody,
    StrictModel,
    field_validation_error,
    ignored_unless,
    only_values,
    unsupported_field,
    validation_error,
)
from router.serving.schema.template_fields import ThinkingFields, Variables
from router.serving.schema.tool import MAX_TOOLS

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
SummaryDetail = Literal["none", "auto", "concise", "detailed"]
"""OpenAI's values, and ``none``, which some clients send in place of null."""


class ReasoningConfig(StrictModel):
    effort: Effort | None = None
    summary: SummaryDetail | None = None
    generate_summary: SummaryDetail | None = None
    """OpenAI's older name for ``summary``."""
    context: (
        Annotated[str, only_values("auto", "all_turns", why="the chat template decides")] | None
    ) = None
    mode: Annotated[str, only_values("standard", why="there is one mode")] | None = None

    @property
    def wants_summary(self) -> bool:
        return (self.summary or self.generate_summary or "none") != "none"


FORMAT_FIELD = "text.format"


class TextFormat(StrictModel):
    """The format of the answer's text: like the ``response_format`` of a chat request, but with the
    fields of ``json_schema`` at the top level, next to ``type``."""

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            message = f"{FORMAT_FIELD} of type json_schema must have a name and a schema"
            raise field_validation_error(FORMAT_FIELD, message)
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the answer; None for plain text."""
        if self.type == "text":
            return None
        schema = self.schema_ if self.type == "json_schema" else None
        return Grammar(GrammarKind.JSON_OBJECT) if schema is None else json_schema_grammar(schema)

    @property
    def answer_format(self) -> dict[str, Any]:
        """The same format as a response repeats it: a schema's format with all its fields."""
        fields = self.model_dump(by_alias=True, exclude_none=True)
        if self.type != "json_schema":
            return fields
        return {"description": None, "strict": False} | fields


class TextConfig(StrictModel):
    """The form of the answer's text. ``verbosity`` is a hint, which is not passed to the model."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


MAX_ITEMS = 16_384
MAX_ID_CHARACTERS = 128


def _check_input(value: Any) -> Any:
    """Check that the input is a text or a list. The items of a list are checked later, when they
    are read."""
    if not isinstance(value, str | list | None):
        raise validation_error("the value must be a string or a list of items")
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        raise validation_error(f"the input may have at most {MAX_ITEMS} items")
    return value


Input = Annotated[Any, AfterValidator(_check_input)]
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARACTERS)]


class InputTokensBody(ThinkingFields, RequestBody):
    """The fields that become the prompt. ``tool_choice`` and each of the ``tools`` are checked
    later, when they are read."""

    input: Input = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    truncation: Annotated[Literal["auto", "disabled"] | None, ignored_unless("disabled")] = None
    """Has no effect: nothing is ever dropped from the input, and an input that is too long is
    refused."""
    conversation: Annotated[
        Any, unsupported_field("there are no conversations; use previous_response_id")
    ] = None
    personality: Annotated[
        Any, unsupported_field("the model has none; describe one in instructions")
    ] = None
    # Not in OpenAI's API
    chat_template_kwargs: Variables | None = None


_OTHER_NAMES = {
    "max_tokens": UnsupportedField("use max_output_tokens"),
    "max_completion_tokens": UnsupportedField("use max_output_tokens"),
    "messages": UnsupportedField("use input", ([],)),
    "response_format": UnsupportedField("use text.format"),
    "reasoning_effort": UnsupportedField("use reasoning.effort"),
    "verbosity": UnsupportedField("use text.verbosity"),
    "logprobs": UnsupportedField("use top_logprobs", (False,)),
    "system": UnsupportedField("use instructions", ("",)),
    "n": UnsupportedField("a response has one answer", (1,)),
    "functions": UnsupportedField("use tools", ([],)),
    "function_call": UnsupportedField("use tool_choice", ("none", "auto")),
    "allowed_token_ids": UnsupportedField("it is a field of chats and completions"),
    "bad_words": UnsupportedField("it is a field of chats and completions", ([],)),
    "continue_final_message": UnsupportedField("it is a field of chats", (False,)),
    "truncate_prompt_tokens": UnsupportedField("it is a field of chats and completions"),
    "guided_json": UnsupportedField("use text.format"),
    "guided_regex": UnsupportedField("use structured_outputs"),
    "guided_choice": UnsupportedField("use structured_outputs"),
    "guided_grammar": UnsupportedField("use structured_outputs"),
}

UNSUPPORTED_FIELDS: Mapping[str, UnsupportedField] = MappingProxyType(
    {**chat.UNSUPPORTED_FIELDS, **_OTHER_NAMES}
)


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
    def wants_obfuscation(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_obfuscation)

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
