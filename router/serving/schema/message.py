"""A message of a chat."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)

from router.serving.schema.strict_model import (
    StrictModel,
    drop_unknown_keys,
    field_validation_error,
    note_ignored,
    unsupported_field,
    validation_error,
)

TTL_SECONDS: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}


DEFAULT_TTL = "5m"


_KEYS = frozenset({"type", "ttl"})


Breakpoint = tuple[int, float]
"""A position in a message's content, in characters, and the number of seconds for which the prompt
up to this position is to be kept cached."""


def check_cache_control(value: Any, info: ValidationInfo | None = None) -> float | None:
    """Check a ``cache_control`` and return its time to live in seconds; None if it is null. Unknown
    fields in it are checked only if ``info`` is given. Raises validation errors."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "ephemeral":
        raise validation_error('cache_control must be like {"type": "ephemeral", "ttl": "5m"}')
    if info is not None:
        drop_unknown_keys(value, _KEYS, "cache_control", info)
    ttl = value.get("ttl")
    if ttl is None:
        ttl = DEFAULT_TTL
    if not isinstance(ttl, str) or ttl not in TTL_SECONDS:
        raise validation_error(f"cache_control.ttl must be one of {', '.join(TTL_SECONDS)}")
    return TTL_SECONDS[ttl]


def find_breakpoints(message: Mapping[str, Any]) -> tuple[Breakpoint, ...]:
    """Return the prompt-cache breakpoints of a message: one after each content part that has a
    ``cache_control``, and one at the end if the message itself has one. ``message`` is the JSON
    object that the client sent; it must have been validated."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    found: list[Breakpoint] = []
    length = 0
    for part in parts:
        if isinstance(part, str):
            length += len(part)
            continue
        length += len(part.get("text") or part.get("refusal") or "")
        seconds = check_cache_control(part.get("cache_control"))
        if seconds is not None:
            found.append((length, seconds))
    seconds = check_cache_control(message.get("cache_control"))
    if seconds is not None:
        found.append((length, seconds))
    return tuple(found)


MAX_MESSAGES = 16_384
MAX_TOOL_CALLS = 128

OTHER_REASONING_FIELDS = ("reasoning", "reasoning_details", "thinking", "thinking_blocks")
"""The names that OpenRouter, vLLM, Ollama and litellm give to ``reasoning_content``."""

RESPONSES_TEXT_TYPES = ("input_text", "output_text")
"""The types of text in the Responses API, which clients send to other APIs, too."""

PART_FIELDS = {"text": "text", **dict.fromkeys(RESPONSES_TEXT_TYPES, "text"), "refusal": "refusal"}
"""The field that has the text of a content part, by the part's type."""


MEDIA_TYPES = frozenset(
    {
        "image_url", "image_pil", "image_embeds", "input_image",
        "audio_url", "audio_embeds", "input_audio", "video_url", "video_embeds",
    }
)  # fmt: skip
"""The types of content parts that only an attached server understands: vLLM's. They are also the
names of the fields with the data."""


def only_text(kind: str) -> str:
    """Return the message about a content part of a type that is not supported."""
    message = f"content of type {kind!r} is not supported, only text"
    if any(name in kind for name in ("image", "audio", "video")):
        message += (
            "; images, audio and video work in /v1/chat/completions, for a model with an attached "
            "server that takes them"
        )
    return message


def _to_text(value: Any, info: ValidationInfo) -> str:
    """Convert a message's content (a string, or a list of text parts and strings) to one string."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise validation_error("the value must be a string or a list of text parts")
    return "".join(_part_text(part, info) for part in value)


def _part_text(part: Any, info: ValidationInfo) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise validation_error("a content part must be a string, or an object with a type")
    kind = part["type"]
    if kind not in PART_FIELDS:
        raise validation_error(only_text(kind))
    field = PART_FIELDS[kind]
    if not isinstance(part.get(field), str):
        raise validation_error(f"a {kind} part must have a string `{field}`")
    drop_unknown_keys(part, frozenset({"type", field, "cache_control"}), "messages.content", info)
    check_cache_control(part.get("cache_control"), info)
    return str(part[field])


def _check_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise validation_error("a tool call must have type `function` and a `function` object")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise validation_error("a tool call's function must have a name")
    if not isinstance(function.get("arguments"), str | dict):
        raise validation_error("a tool call's function must have arguments, as JSON text")
    if not isinstance(call.get("id"), str | None):
        raise validation_error("a tool call's id must be a string")
    return call


def _drop_annotations(value: Any, info: ValidationInfo) -> None:
    """Drop the annotations of an earlier answer, such as the results of web searches."""
    if value:
        note_ignored(info, "messages.annotations")


def _to_reasoning(value: Any, info: ValidationInfo) -> str | None:
    """Convert earlier reasoning (a string, or a list of blocks) to one string. Blocks without text,
    such as encrypted ones, are left out, and so are values of other types: other providers define
    the field."""
    if isinstance(value, list):
        value = "".join(map(_reasoning_block_text, value))  # blocks may be pieces of a stream
    if value is not None and not isinstance(value, str):
        note_ignored(info, f"messages.{info.field_name}")
        return None
    return value or None


def _reasoning_block_text(block: Any) -> str:
    if not isinstance(block, dict):
        return ""
    texts = (block.get(key) for key in ("text", "thinking", "summary"))
    return next((text for text in texts if isinstance(text, str)), "")


OtherReasoning = Annotated[
    str | None, BeforeValidator(_to_reasoning, json_schema_input_type=str | list[Any] | None)
]

Calls = Annotated[
    list[Annotated[dict[str, Any], AfterValidator(_check_call)]],
    Field(max_length=MAX_TOOL_CALLS, fail_fast=True),
]


def _checked_cache_control(value: Any, info: ValidationInfo) -> Any:
    check_cache_control(value, info)
    return value


def _note_unknown_fields(message: dict[str, Any], info: ValidationInfo) -> None:
    known = MESSAGE_FIELDS if message.get("role") == "assistant" else FIELDS_OF_ANY_ROLE
    if not known.issuperset(message):
        for name in message:
            if name not in known:
                note_ignored(info, f"messages.{name}")


class Message(StrictModel):
    """One message. ``tool_calls`` are an assistant's earlier calls in OpenAI's format, and
    ``reasoning_content`` is its earlier reasoning, for chat templates that render it. Clients send
    reasoning under other names, too (:data:`OTHER_REASONING_FIELDS`).

    Unknown fields are always ignored, since clients also send back answers from other providers
    unchanged."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_to_text)] = Field(default="", validate_default=True)
    name: str | None = None
    tool_calls: Calls | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: OtherReasoning = None
    reasoning_details: OtherReasoning = None
    thinking: OtherReasoning = None
    thinking_blocks: OtherReasoning = None
    cache_control: Annotated[Any, AfterValidator(_checked_cache_control)] = None
    # Fields of answers, so that clients can send them back unchanged
    annotations: Annotated[Any, AfterValidator(_drop_annotations)] = None
    audio: Annotated[Any, unsupported_field("the model supports only text")] = None
    function_call: Annotated[Any, unsupported_field("deprecated by OpenAI; use tool_calls")] = None

    _breakpoints: tuple[Breakpoint, ...] = PrivateAttr(())

    @property
    def reasoning_text(self) -> str:
        """The earlier reasoning, empty if there is none. If the message has it under several names,
        they mean the same reasoning, so only the first one counts. Messages of other roles than
        the assistant's have no other names."""
        others = OTHER_REASONING_FIELDS if self.role == "assistant" else ()
        names = ("reasoning_content", *others)
        return next((text for name in names if (text := getattr(self, name))), "")

    @property
    def breakpoints(self) -> tuple[Breakpoint, ...]:
        """The breakpoints from ``cache_control`` of the message or of its content parts."""
        return self._breakpoints

    def set_breakpoints(self, breakpoints: Sequence[Breakpoint]) -> None:
        """Set the breakpoints of a message that has no ``cache_control``. Their positions must
        ascend."""
        self._breakpoints = tuple(breakpoints)

    @model_validator(mode="wrap")
    @classmethod
    def _note_breakpoints(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        message = validate(value)
        has_parts = isinstance(value, dict) and isinstance(value.get("content"), list)
        if has_parts or message.cache_control is not None:
            message._breakpoints = find_breakpoints(value)
        return message

    @model_validator(mode="before")
    @classmethod
    def _is_whole(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        _note_unknown_fields(value, info)
        role = value.get("role")
        if role != "assistant" and value.get("content") is None:
            raise validation_error("a message must have `content`")
        if role == "tool" and value.get("tool_call_id") is None:
            raise validation_error("a message of role `tool` must have a `tool_call_id`")
        if role != "assistant" and value.get("tool_calls") is not None:
            raise validation_error("only a message of role `assistant` may have `tool_calls`")
        return value


MESSAGE_FIELDS = frozenset(Message.model_fields)
FIELDS_OF_ANY_ROLE = MESSAGE_FIELDS.difference(OTHER_REASONING_FIELDS)

Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


MESSAGES = TypeAdapter(Messages)


def check_continuation(messages: Sequence[Message], add_generation_prompt: bool | None) -> None:
    """Check that the last message can be continued. Raises validation errors."""
    field = "continue_final_message"
    if add_generation_prompt is not False:
        raise field_validation_error(
            field, f"{field} is only allowed with add_generation_prompt false"
        )
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or not last.content or last.tool_calls:
        raise field_validation_error(
            field,
            f"{field} needs a last message of role `assistant`, with content and no tool_calls",
        )
