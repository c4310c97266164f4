"""Encoder of answers as messages of Anthropic's API."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from router.errors import ApiError
from router.generation.prefix_pinner import PrefixPin
from router.serving.answer_encoder import AnswerEncoder, Usage
from router.serving.choice_result import ChoiceResult
from router.serving.choice_stream import FINISH_REASON_TOOL_CALLS, ChoiceDelta
from router.serving.parsers.output_parts import (
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)
from router.serving.schema.message import TTL_SECONDS

SERVICE_TIER = "standard"

LONG_TTL_SECONDS = TTL_SECONDS["1h"]


@dataclass(frozen=True, slots=True)
class CacheBreakpoints:
    """The number of prompt tokens before the last breakpoint with a short time to live, and before
    the last one with a long time to live; 0 if there is no such breakpoint."""

    short_tokens: int = 0
    long_tokens: int = 0

    @classmethod
    def of(cls, pins: Sequence[PrefixPin]) -> "CacheBreakpoints":
        long = [pin.num_tokens for pin in pins if pin.ttl_seconds == LONG_TTL_SECONDS]
        short = [pin.num_tokens for pin in pins if pin.ttl_seconds != LONG_TTL_SECONDS]
        return cls(max(short, default=0), max(long, default=0))


def encode_usage(usage: Usage, breakpoints: CacheBreakpoints) -> dict[str, Any]:
    """Return the usage as a JSON object. As in Anthropic's API, the prompt's tokens are the sum of
    ``input_tokens``, ``cache_read_input_tokens`` (found in the cache, with or without breakpoints)
    and ``cache_creation_input_tokens`` (computed, and located before a breakpoint)."""
    cached = usage.cached_tokens
    created_long = max(breakpoints.long_tokens - cached, 0)
    created_short = max(breakpoints.short_tokens - max(breakpoints.long_tokens, cached), 0)
    created = created_long + created_short
    return {
        "input_tokens": usage.prompt_tokens - cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created_short,
            "ephemeral_1h_input_tokens": created_long,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "service_tier": SERVICE_TIER,
    }


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


PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"

DELTA_FIELDS = {
    TEXT: ("text_delta", "text"),
    THINKING: ("thinking_delta", "thinking"),
    TOOL_USE: ("input_json_delta", "partial_json"),
}
"""The type and the field of a delta, by the type of its block."""

DELTA_END = b"}}\n\n"


class MessageEncoder(AnswerEncoder):
    """Encodes one message. ``call_id`` makes a tool call's id from the index of the call, and
    ``encode_failure`` encodes an error as an event. ``is_capped`` says whether the answer is
    limited by the context rather than by ``max_tokens``.

    In a stream, the deltas of one content block differ only in their text, so the bytes around the
    text are encoded once per block."""

    def __init__(
        self,
        message_id: str,
        model: str,
        *,
        call_id: Callable[[int], str],
        encode_failure: Callable[[ApiError], bytes],
        breakpoints: CacheBreakpoints,
        is_capped: bool,
        hides_thinking: bool,
    ) -> None:
        self._id = message_id
        self._model = model
        self._call_id = call_id
        self._encode_failure = encode_failure
        self._breakpoints = breakpoints
        self._is_capped = is_capped
        self._hides_thinking = hides_thinking
        self._block_type = ""
        """The type of the open block; empty while none is open."""
        self._num_blocks = 0
        self._delta_begin = b""
        self._stop: dict[str, Any] = {}

    def encode_opening(self, answer: ChoiceResult, usage: Usage) -> bytes:
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return _event("message_start", message=message) + PING

    def encode_chunk(self, delta: ChoiceDelta) -> bytes:
        events = [self._encode_part(part) for part in delta.parts]
        if delta.text:
            events.append(self.encode_text(delta.index, delta.text))
        if delta.finish_reason is not None:
            self._stop = self._stop_fields(delta.finish_reason, delta.stop_string)
        return b"".join(events)

    def encode_text(self, index: int, text: str) -> bytes:
        if self._block_type == TEXT:
            return self._delta_begin + orjson.dumps(text) + DELTA_END
        return self._open_block(text_block()) + self._delta(text)

    def _encode_part(self, part: OutputPart) -> bytes:
        match part:
            case TextPart(text):
                return self.encode_text(0, text) if text else b""
            case ReasoningPart(text):
                return self._encode_thinking(text) if text else b""
            case ToolCallStart(index, name):
                return self._open_block(tool_use_block(self._call_id(index), name))
            case ToolCallArguments(_, arguments):
                return self._delta(arguments) if arguments else b""

    def _encode_thinking(self, text: str) -> bytes:
        opening = b"" if self._block_type == THINKING else self._open_block(thinking_block())
        return opening if self._hides_thinking else opening + self._delta(text)

    def _delta(self, text: str) -> bytes:
        return self._delta_begin + orjson.dumps(text) + DELTA_END

    def _open_block(self, block: dict[str, Any]) -> bytes:
        """Encode the end of the open block, if there is one, and the start of ``block``."""
        events = self._close_block()
        index = self._num_blocks
        self._num_blocks += 1
        self._block_type = block["type"]
        kind, field = DELTA_FIELDS[self._block_type]
        self._delta_begin = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":' % (index, kind.encode(), field.encode())
        )
        return events + _event("content_block_start", index=index, content_block=block)

    def _close_block(self) -> bytes:
        if not self._block_type:
            return b""
        index, events = self._num_blocks - 1, b""
        if self._block_type == THINKING:
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            events = _event("content_block_delta", index=index, delta=delta)
        self._block_type = ""
        return events + _event("content_block_stop", index=index)

    def encode_end(self, usage: Usage) -> bytes:
        end = _event("message_delta", delta=self._stop, usage=self._usage(usage))
        return self._close_block() + end + STOP

    def encode_comment(self, text: str) -> bytes:
        """Encode a comment as a ping, since streams of this API consist of events only."""
        return _event("ping", comment=text)

    def encode_failure(self, error: ApiError) -> bytes:
        return self._encode_failure(error)

    def encode_response(self, answers: Sequence[ChoiceResult], usage: Usage) -> bytes:
        [answer] = answers
        content = content_blocks(answer, self._call_id, hides_thinking=self._hides_thinking)
        stop = self._stop_fields(answer.finish_reason or "", answer.stop_string)
        return orjson.dumps(self._message(content, stop, usage))

    def _message(
        self, content: list[dict[str, Any]], stop: dict[str, Any], usage: Usage
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **stop,
            "usage": self._usage(usage),
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return encode_usage(usage, self._breakpoints)

    def _stop_fields(self, finish_reason: str, stop_string: str | None) -> dict[str, Any]:
        if finish_reason == FINISH_REASON_TOOL_CALLS:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if finish_reason == "length":
            reason = "model_context_window_exceeded" if self._is_capped else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        if stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))
