"""Encoder of answers as messages of Anthropic's API."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from router.anthropic.content import (
    SIGNATURE,
    content_blocks,
    text_block,
    thinking_block,
    tool_use_block,
)
from router.anthropic.usage import CacheBreakpoints, encode_usage
from router.errors import ApiError
from router.openai.choice_result import ChoiceResult
from router.openai.choice_stream import FINISH_REASON_TOOL_CALLS, ChoiceDelta
from router.openai.encoders import AnswerEncoder, ResponseMetadata, Usage
from router.openai.parsers.output_parts import (
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)

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
        metadata: ResponseMetadata,
        *,
        call_id: Callable[[int], str],
        encode_failure: Callable[[ApiError], bytes],
        breakpoints: CacheBreakpoints,
        is_capped: bool,
        hides_thinking: bool,
    ) -> None:
        self._metadata = metadata
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

    def encode_failure(self, error: ApiError) -> bytes:
        return self._encode_failure(error)

    def encode_response(self, answers: Sequence[ChoiceResult], usage: Usage) -> bytes:
        [answer] = answers
        content = content_blocks(answer, self._call_id, hides_thinking=self._hides_thinking)
        stop = self._stop_fields(answer.finish_reason or "", answer.stop_string)
        return orjson.dumps(self._message(content, stop, usage))

    def set_token_counts(self, index: int, prompt_tokens: int, completion_tokens: int) -> None:
        """Do nothing: only the first and the last event report token counts."""

    def _message(
        self, content: list[dict[str, Any]], stop: dict[str, Any], usage: Usage
    ) -> dict[str, Any]:
        return {
            "id": self._metadata.id,
            "type": "message",
            "role": "assistant",
            "model": self._metadata.model,
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
