"""The content blocks of messages."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WrapValidator

from router.anthropic.schema.cache_control import CacheControl
from router.openai.schema.strict_model import StrictModel, validation_error

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
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            raise validation_error("a content block must be an object with a type")
        kind = value["type"]
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
