"""Encoder of responses, as output items or as the events of a stream."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.openai.choice_result import ChoiceResult
from router.openai.choice_stream import ChoiceDelta
from router.openai.encoders import AnswerEncoder, Usage
from router.openai.parsers.output_parts import OutputPart, TextPart
from router.openai.token_entry import TokenEntry
from router.responses.event_stream import EventStream
from router.responses.output_item import ItemStatus, MessageItem, OutputItem
from router.responses.output_items import OutputItems, OutputOptions
from router.responses.response_status import failure
from router.responses.text_logprobs import TextLogprobs

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

    def set_token_counts(self, index: int, prompt_tokens: int, completion_tokens: int) -> None:
        """Do nothing: only the last event reports token counts."""

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
