"""Messages and their content blocks."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, WrapValidator, model_validator

from router.serving.schema.message import (
    DEFAULT_TTL,
    MAX_MESSAGES,
    RESPONSES_TEXT_TYPES,
    TTL_SECONDS,
    only_text,
)
from router.serving.schema.strict_model import StrictModel, validation_error


class CacheControl(StrictModel):
    """Marks the end of a prefix of the prompt that is to be kept cached. Unknown fields (such as
    ``scope``) are ignored, since the whole object is only a hint."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        return TTL_SECONDS[self.ttl or DEFAULT_TTL]


BlockTypes = Mapping[str, type["Block"]]


class Block(StrictModel):
    """A content block. Unknown fields (``citations``, ``caller`` and others) are ignored, since
    clients also send back answers from other providers unchanged."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(Block):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(Block):
    """Earlier reasoning. Its signature is ignored."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Block):
    """Encrypted reasoning of another provider, which nobody else can read. It is ignored."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Block):
    """An earlier tool call of the model."""

    type: Literal["tool_use"]
    id: str
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]
    cache_control: CacheControl | None = None


def _to_blocks(value: Any) -> Any:
    """Convert a string to a list of one text block."""
    if isinstance(value, str):
        return [TextBlock(type="text", text=value)]
    if not isinstance(value, list):
        raise validation_error("the value must be a string or a list of content blocks")
    return value


def _block_parser(types: BlockTypes) -> WrapValidator:
    """Return a validator that parses a block by its type. Errors name the block's own fields, and a
    type that is not in ``types`` is refused by name."""

    def parse(value: Any, _: Any) -> Block:
        if isinstance(value, Block):
            return value
        if isinstance(value, str):
            return TextBlock(type="text", text=value)
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            raise validation_error("a content block must be a string, or an object with a type")
        kind = value["type"]
        if kind in RESPONSES_TEXT_TYPES:
            kind, value = "text", {**value, "type": "text"}
        if kind == "image":
            raise validation_error(only_text(kind))
        if kind not in types:
            supported = ", ".join(types)
            raise validation_error(
                f"content blocks of type {kind!r} are not supported here, only {supported}"
            )
        return types[kind].model_validate(value)

    return WrapValidator(parse)


TEXT_TYPES: BlockTypes = {"text": TextBlock}

TextContent = Annotated[
    list[Annotated[TextBlock, _block_parser(TEXT_TYPES)]],
    BeforeValidator(_to_blocks, json_schema_input_type=str | list[TextBlock]),
]
"""A string or text blocks, as a list of text blocks."""


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextContent = Field(default_factory=list)
    is_error: bool | None = None
    cache_control: CacheControl | None = None


ContentBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock

USER_TYPES: BlockTypes = {"text": TextBlock, "tool_result": ToolResultBlock}
ASSISTANT_TYPES: BlockTypes = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
}

Content = Annotated[
    list[Annotated[ContentBlock, _block_parser(USER_TYPES | ASSISTANT_TYPES)]],
    BeforeValidator(_to_blocks, json_schema_input_type=str | list[ContentBlock]),
]
"""A string or content blocks, as a list of content blocks."""


ROLE_TYPES: dict[str, BlockTypes] = {
    "user": USER_TYPES,
    "assistant": ASSISTANT_TYPES,
    "system": TEXT_TYPES,
}
"""The types of blocks that messages of each role may have."""


class MessageParam(StrictModel):
    """One message. Unknown fields are ignored, since clients also send back whole answers as
    messages."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _blocks_suit_the_role(self) -> Self:
        types = ROLE_TYPES[self.role]
        for number, block in enumerate(self.content):
            if block.type not in types:
                raise validation_error(
                    f"block {number} of the content has type {block.type!r}, which a message of "
                    f"role {self.role!r} can't have"
                )
        return self


MessageParams = Annotated[
    list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]
