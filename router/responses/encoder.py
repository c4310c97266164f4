"""Encoder of responses, as a whole or as the events of a stream."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from baton.core.ids import TokenId
from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.openai.encoders.encoder import OBFUSCATION_BLOCK_BYTES
from router.responses.output_items import (
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputItems,
    OutputOptions,
)
from router.responses.response_status import failure
from router.responses.schema import ReasoningConfig, ResponsesBody, TextConfig
from router.responses.tools import OfferedTools
from router.serving.answer_encoder import AnswerEncoder, Usage
from router.serving.choice_result import ChoiceResult
from router.serving.choice_stream import MIN_LOGPROB, ChoiceDelta, TokenEntry
from router.serving.parsers.output_parts import OutputPart, TextPart
from router.serving.sampling_defaults import SamplingDefaults


class EventStream:
    """Encodes the events of one stream, and numbers them from 0. If ``is_obfuscated`` is True,
    deltas are padded so that their sizes don't reveal their contents."""

    def __init__(self, *, is_obfuscated: bool) -> None:
        self._is_obfuscated = is_obfuscated
        self._num_events = 0
        self._delta_prefix = b""

    @property
    def has_begun(self) -> bool:
        return self._num_events > 0

    def encode(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        if self._is_obfuscated and kind.endswith(".delta"):
            data = b'%b,"obfuscation":"%b"}' % (data[:-1], _padding(data))
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def set_delta(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Set the type of the next deltas, and the fields that they have in common."""
        data = orjson.dumps({"type": kind, **fields})
        self._delta_prefix = b'event: %b\ndata: %b,"delta":' % (kind.encode(), data[:-1])

    def encode_delta(self, text: str) -> bytes:
        """Encode an event that adds text. This is called once per token."""
        number, data = self._num_events, orjson.dumps(text)
        self._num_events = number + 1
        if self._is_obfuscated:
            end = b',"sequence_number":%d,"obfuscation":"%b"}\n\n' % (number, _padding(data))
            return self._delta_prefix + data + end
        return self._delta_prefix + data + b',"sequence_number":%d}\n\n' % number


def _padding(data: bytes) -> bytes:
    return b"0" * (-len(data) % OBFUSCATION_BLOCK_BYTES)


class TextLogprobs:
    """Collects an answer's tokens, and finds the tokens that a piece of its text consists of. The
    pieces must be taken in their order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[tuple[TokenEntry | None, bytes]] = []
        """The tokens that were not taken yet. The first one may be the rest of a taken token, which
        has no entry any more."""

    def add(self, entries: Sequence[TokenEntry]) -> None:
        self._tokens += [
            (entry, self._tokenizer.token_bytes(entry.logprob.token_id)) for entry in entries
        ]

    def take(self, text: str, *, newest: bool) -> list[dict[str, Any]]:
        """Return the logprobs of the text's tokens, and drop these tokens and all earlier ones. If
        ``newest`` is True, the text is searched for from the end of the tokens, else from the
        beginning. If it is not found, for example because the model wrote invalid UTF-8, drop all
        tokens."""
        tokens, wanted = self._tokens, text.encode(errors="replace")
        data = b"".join(piece for _, piece in tokens)
        start = data.rfind(wanted) if newest else data.find(wanted)
        end = start + len(wanted) if start >= 0 else len(data)
        taken: list[TokenEntry] = []
        self._tokens = []
        offset = 0
        for entry, piece in tokens:
            piece_end = offset + len(piece)
            if entry is not None and offset < end and piece_end > start >= 0:
                taken.append(entry)
            if piece_end > end:
                rest = (entry, piece) if offset >= end else (None, piece[end - offset :])
                self._tokens.append(rest)
            offset = piece_end
        return [self._encode(entry) for entry in taken]

    def _encode(self, entry: TokenEntry) -> dict[str, Any]:
        top = [self._encode_token(*pair) for pair in entry.logprob.top]
        chosen = self._encode_token(entry.logprob.token_id, entry.logprob.logprob)
        return {**chosen, "top_logprobs": top}

    def _encode_token(self, token_id: TokenId, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {
            "token": data.decode(errors="replace"),
            "bytes": list(data),
            "logprob": max(logprob, MIN_LOGPROB),
        }


FINISH_REASON_LENGTH = "length"


class ResponsesEncoder(AnswerEncoder):
    """Encodes one response, which has one choice. ``fields`` are the fields that are the same in
    all states of the response; they are encoded once. ``tokenizer`` is None if the client wants no
    logprobs. ``unix_seconds`` returns the time.

    The events follow the items: whenever a part of the answer does not belong to the open item,
    that item is closed and another one is opened."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        options: OutputOptions,
        tokenizer: Tokenizer | None,
        *,
        is_obfuscated: bool,
        unix_seconds: Callable[[], int],
    ) -> None:
        self._fields = fields
        self._unix_seconds = unix_seconds
        self._head = orjson.dumps(fields)[:-1]
        self._output = OutputItems(options)
        self._logprobs = TextLogprobs(tokenizer) if tokenizer is not None else None
        self.keeps_logprobs = tokenizer is not None
        self._events = EventStream(is_obfuscated=is_obfuscated)
        self._open: OutputItem | None = None
        self._closed: list[dict[str, Any]] = []
        self._finish_reason: str | None = None
        self._final_state: dict[str, Any] = {}

    @property
    def response(self) -> Mapping[str, Any]:
        """The whole response. Read this only after the response has been encoded."""
        return {**self._fields, **self._final_state}

    @property
    def queued_response(self) -> Mapping[str, Any]:
        """The response before it is generated, for a client that does not wait for it."""
        return {**self._fields, **_state("queued", [])}

    # -- the whole response --------------------------------------------------------------------

    def encode_response(self, answers: Sequence[ChoiceResult], usage: Usage) -> bytes:
        answer = answers[0]
        self._finish_reason = answer.finish_reason
        if answer.parts:
            self._add_parts(answer)
        else:
            item, text = self._output.take(TextPart(answer.text))
            item.append(text)
            self._add_logprobs(item, text, answer.token_entries, newest=False)
        items = self._output.items
        done = [item.json("completed") for item in items[:-1]]
        self._closed = [*done, items[-1].json(self._item_status)]
        return self._encode_state(self._end_state(usage))

    def _add_parts(self, answer: ChoiceResult) -> None:
        """Add the answer's parts to the items. As in a stream, a part's logprobs are searched for
        only among the tokens that had arrived when the part ended."""
        start = 0
        for part, end in answer.parts.with_ends():
            item, text = self._output.take(part)
            if text:
                item.append(text)
                self._add_logprobs(item, text, answer.token_entries[start:end], newest=True)
                start = end

    def _add_logprobs(
        self, item: OutputItem, text: str, entries: Sequence[TokenEntry], *, newest: bool
    ) -> None:
        if self._logprobs is None:
            return
        self._logprobs.add(entries)
        logprobs = self._logprobs.take(text, newest=newest)
        if isinstance(item, MessageItem):
            item.logprobs += logprobs

    # -- events --------------------------------------------------------------------------------

    def encode_opening(self, answer: ChoiceResult, usage: Usage) -> bytes:
        return self._encode_created()

    def _encode_created(self) -> bytes:
        state = _state("in_progress", [])
        return b"".join(
            self._encode_state_event(kind, state)
            for kind in ("response.created", "response.in_progress")
        )

    def encode_text(self, index: int, text: str) -> bytes:
        if not isinstance(self._open, MessageItem) or self._logprobs is not None:
            return self._encode_part(TextPart(text))
        self._open.append(text)
        return self._events.encode_delta(text)

    def encode_chunk(self, delta: ChoiceDelta) -> bytes:
        self._finish_reason = delta.finish_reason
        if self._logprobs is not None:
            self._logprobs.add(delta.token_entries)
        parts = [TextPart(delta.text)] if delta.text else delta.parts
        return b"".join(map(self._encode_part, parts))

    def _encode_part(self, part: OutputPart) -> bytes:
        item, text = self._output.take(part)
        opening = b"" if item is self._open else self._close("completed") + self._begin(item)
        if not text:
            return opening
        item.append(text)
        if self._logprobs is not None:
            return opening + self._encode_with_logprobs(item, text)
        return opening + self._encode_delta(item, text)

    def _encode_delta(self, item: OutputItem, text: str) -> bytes:
        return self._events.encode_delta(text) if item.delta_event else b""

    def _encode_with_logprobs(self, item: OutputItem, text: str) -> bytes:
        assert self._logprobs is not None
        logprobs = self._logprobs.take(text, newest=True)
        if not isinstance(item, MessageItem):
            return self._encode_delta(item, text)
        item.logprobs += logprobs
        fields = {"delta": text, "logprobs": logprobs}
        position = {**self._position(item), **item.position}
        return self._events.encode(item.delta_event, position | fields)

    def _begin(self, item: OutputItem) -> bytes:
        self._open = item
        if item.delta_event:
            extra: dict[str, Any] = {"logprobs": []} if isinstance(item, MessageItem) else {}
            self._events.set_delta(
                item.delta_event, {**self._position(item), **item.position, **extra}
            )
        return self._encode_item_event("added", item.json("in_progress")) + self._encode_events(
            item, item.opening()
        )

    def _close(self, status: ItemStatus) -> bytes:
        """Close the open item, if there is one."""
        item = self._open
        if item is None:
            return b""
        closing = self._encode_events(item, item.closing())
        closed = item.json(status)
        closing += self._encode_item_event("done", closed)
        self._closed.append(closed)
        self._open = None
        return closing

    def _encode_events(
        self, item: OutputItem, events: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> bytes:
        position = self._position(item)
        return b"".join(
            self._events.encode(kind, {**position, **fields}) for kind, fields in events
        )

    def _encode_item_event(self, verb: str, item: Mapping[str, Any]) -> bytes:
        fields = {"output_index": len(self._closed), "item": item}
        return self._events.encode(f"response.output_item.{verb}", fields)

    def _position(self, item: OutputItem) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self._closed)}

    def encode_end(self, usage: Usage) -> bytes:
        opening = b"" if self._output.items else self._encode_part(TextPart(""))
        closing = self._close(self._item_status)
        state = self._end_state(usage)
        return opening + closing + self._encode_state_event(f"response.{state['status']}", state)

    def fail(self, error: ApiError) -> None:
        """End the response with an error and the items so far."""
        output = (
            self._closed if self._open is None else [*self._closed, self._open.json("incomplete")]
        )
        self._final_state = _state("failed", output) | {"error": failure(error)}

    def encode_failure(self, error: ApiError) -> bytes:
        self.fail(error)
        opening = b"" if self._events.has_begun else self._encode_created()
        return opening + self._encode_state_event("response.failed", self._final_state)

    # -- states of the response ----------------------------------------------------------------

    @property
    def _item_status(self) -> ItemStatus:
        """The status of the last item."""
        return "incomplete" if self._finish_reason == FINISH_REASON_LENGTH else "completed"

    def _end_state(self, usage: Usage) -> dict[str, Any]:
        """Remember and return the final values of the fields that change."""
        state = _state(self._item_status, self._closed) | {"usage": _usage(usage)}
        if self._item_status == "incomplete":
            state["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            state["completed_at"] = self._unix_seconds()
        self._final_state = state
        return state

    def _encode_state(self, state: Mapping[str, Any]) -> bytes:
        return self._head + b"," + orjson.dumps(state)[1:]

    def _encode_state_event(self, kind: str, state: Mapping[str, Any]) -> bytes:
        return self._events.encode(kind, {"response": orjson.Fragment(self._encode_state(state))})


def _state(status: str, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "status": status,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": output,
        "usage": None,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_fields(
    response_id: str,
    created: int,
    model: str,
    body: ResponsesBody,
    tools: OfferedTools,
    defaults: SamplingDefaults,
    *,
    is_stored: bool,
) -> dict[str, Any]:
    """Return the fields that are the same in all states of a response. Hosted tools, which the
    model does not see, are left out."""
    sampling = defaults.with_values_of(body)
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "model": model,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "presence_penalty": body.presence_penalty or 0.0,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": _reasoning(body.reasoning or ReasoningConfig()),
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": sampling.temperature,
        "text": _text(body.text or TextConfig()),
        "tool_choice": body.tool_choice or "auto",
        "tools": tools.kept,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _reasoning(config: ReasoningConfig) -> dict[str, Any]:
    return {"effort": config.effort, "summary": config.summary if config.wants_summary else None}


def _text(config: TextConfig) -> dict[str, Any]:
    return {
        "format": config.format.answer_format if config.format else {"type": "text"},
        "verbosity": config.verbosity or "medium",
    }
