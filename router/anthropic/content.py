"""Builds the content blocks of a whole answer."""

from collections.abc import Callable, Iterable
from typing import Any

import orjson

from router.openai.choice_result import ChoiceResult
from router.openai.parsers.output_parts import (
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)

SIGNATURE = "unsigned"
"""The signature of thinking blocks. Clients send it back and may insist on having one; Baton signs
nothing and ignores what clients send."""

INVALID_JSON = "INVALID_JSON"
"""The key under which arguments that are not a JSON object are shown, as Anthropic's documentation
suggests for such arguments."""


def text_block(text: str = "") -> dict[str, Any]:
    return {"type": "text", "text": text}


def thinking_block(thinking: str = "", signature: str = "") -> dict[str, Any]:
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def tool_use_block(call_id: str, name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {}}


def content_blocks(
    answer: ChoiceResult, call_id: Callable[[int], str], *, hides_thinking: bool
) -> list[dict[str, Any]]:
    """Return the blocks of an answer. ``call_id`` makes a tool call's id from the index of the
    call."""
    parts: Iterable[OutputPart] = answer.parts or [TextPart(answer.text)]
    blocks: list[dict[str, Any]] = []
    pieces: list[list[str]] = []
    for part in parts:
        block, piece = _block_and_piece(part, call_id)
        if not piece and block["type"] != "tool_use":
            continue
        is_new = isinstance(part, ToolCallStart) or not (
            blocks and blocks[-1]["type"] == block["type"]
        )
        if is_new:
            blocks.append(block)
            pieces.append([])
        pieces[-1].append(piece)
    for block, text in zip(blocks, pieces, strict=True):
        _fill(block, "".join(text), hides_thinking)
    return blocks


def _block_and_piece(part: OutputPart, call_id: Callable[[int], str]) -> tuple[dict[str, Any], str]:
    """Return an empty block of the part's type, and the part's text."""
    match part:
        case TextPart(text):
            return text_block(), text
        case ReasoningPart(text):
            return thinking_block(), text
        case ToolCallStart(index, name):
            return tool_use_block(call_id(index), name), ""
        case ToolCallArguments(_, arguments):
            return tool_use_block("", ""), arguments


def _fill(block: dict[str, Any], text: str, hides_thinking: bool) -> None:
    match block["type"]:
        case "text":
            block["text"] = text
        case "thinking":
            block["thinking"] = "" if hides_thinking else text
            block["signature"] = SIGNATURE
        case "tool_use":
            block["input"] = encode_arguments(text)


def encode_arguments(text: str) -> orjson.Fragment:
    """Return a call's arguments as a JSON object, exactly as the model wrote it: if it were decoded
    and encoded again, large integers would change, and deep nesting would fail. Arguments that are
    not a JSON object, for example because ``max_tokens`` cut them off, become text under
    :data:`INVALID_JSON`."""
    if not text.strip():
        return orjson.Fragment("{}")
    try:
        is_object = isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return orjson.Fragment(text if is_object else orjson.dumps({INVALID_JSON: text}))
