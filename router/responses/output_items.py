"""The output items of a response, and how the parts of an answer are sorted into them."""

import base64
import binascii
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from router.responses.input_items import make_item_id
from router.responses.tools import ToolIdentity, decode_custom_arguments
from router.serving.choice_result import TextBuffer
from router.serving.parsers.output_parts import (
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)

PREFIX = "baton-v1:"
"""Distinguishes Baton's reasoning from the reasoning of other servers, which can't be read."""


def encode_reasoning(text: str) -> str:
    return PREFIX + base64.b64encode(text.encode(errors="replace")).decode()


def decode_reasoning(content: str) -> str | None:
    """Return the reasoning; None if another server has encrypted it."""
    if not content.startswith(PREFIX):
        return None
    try:
        return base64.b64decode(content.removeprefix(PREFIX), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


Event = tuple[str, Mapping[str, Any]]
"""The type of an event, and its fields besides the position of its item."""

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputItem(ABC):
    """One item. Its text is appended piece by piece; ``delta_event`` is the type of event for each
    piece, or empty if the pieces are not streamed. ``position`` has the fields of an event that say
    which part of the item the event is about."""

    delta_event: str
    position: Mapping[str, Any] = {}

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self._text = TextBuffer()

    def append(self, text: str) -> None:
        self._text.append(text)

    @property
    def text(self) -> str:
        return self._text.text

    @abstractmethod
    def json(self, status: ItemStatus) -> dict[str, Any]:
        """Return the item as a JSON object. It has no content while it is in progress."""

    @abstractmethod
    def opening(self) -> Sequence[Event]:
        """Return the events between ``output_item.added`` and the first piece."""

    @abstractmethod
    def closing(self) -> Sequence[Event]:
        """Return the events between the last piece and ``output_item.done``."""


class MessageItem(OutputItem):
    """A message of the assistant. ``logprobs`` are the logprobs of its tokens, if the client
    requested them."""

    delta_event = "response.output_text.delta"
    position: Mapping[str, Any] = {"content_index": 0}

    def __init__(self, item_id: str) -> None:
        super().__init__(item_id)
        self.logprobs: list[dict[str, Any]] = []

    def json(self, status: ItemStatus) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if status == "in_progress" else [self._part(self.text)],
        }

    def opening(self) -> Sequence[Event]:
        return [("response.content_part.added", {**self.position, "part": _text_part("", [])})]

    def closing(self) -> Sequence[Event]:
        text, logprobs = self.text, self.logprobs
        return [
            ("response.output_text.done", {**self.position, "text": text, "logprobs": logprobs}),
            ("response.content_part.done", {**self.position, "part": self._part(text)}),
        ]

    def _part(self, text: str) -> dict[str, Any]:
        return _text_part(text, self.logprobs)


class ReasoningItem(OutputItem):
    """An item that has the reasoning as its content. ``encrypts`` says whether it also has the
    reasoning as ``encrypted_content``."""

    delta_event = "response.reasoning_text.delta"
    position: Mapping[str, Any] = {"content_index": 0}

    def __init__(self, item_id: str, *, encrypts: bool) -> None:
        super().__init__(item_id)
        self._encrypts = encrypts

    def json(self, status: ItemStatus) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id, "type": "reasoning", "status": status, "summary": []}
        is_open = status == "in_progress"
        self._add_parts(item, [] if is_open else [self.text])
        if self._encrypts and not is_open:
            item["encrypted_content"] = encode_reasoning(self.text)
        return item

    def _add_parts(self, item: dict[str, Any], texts: Sequence[str]) -> None:
        item["content"] = [{"type": "reasoning_text", "text": text} for text in texts]

    def opening(self) -> Sequence[Event]:
        part = {"type": "reasoning_text", "text": ""}
        return [("response.content_part.added", {**self.position, "part": part})]

    def closing(self) -> Sequence[Event]:
        text = self.text
        part = {"type": "reasoning_text", "text": text}
        return [
            ("response.reasoning_text.done", {**self.position, "text": text}),
            ("response.content_part.done", {**self.position, "part": part}),
        ]


class ReasoningSummaryItem(ReasoningItem):
    """An item that has the reasoning as its summary, for clients that request a summary because
    they show nothing else."""

    delta_event = "response.reasoning_summary_text.delta"
    position: Mapping[str, Any] = {"summary_index": 0}

    def _add_parts(self, item: dict[str, Any], texts: Sequence[str]) -> None:
        item["summary"] = [{"type": "summary_text", "text": text} for text in texts]

    def opening(self) -> Sequence[Event]:
        part = {"type": "summary_text", "text": ""}
        return [("response.reasoning_summary_part.added", {**self.position, "part": part})]

    def closing(self) -> Sequence[Event]:
        text = self.text
        part = {"type": "summary_text", "text": text}
        return [
            ("response.reasoning_summary_text.done", {**self.position, "text": text}),
            ("response.reasoning_summary_part.done", {**self.position, "part": part}),
        ]


class FunctionCallItem(OutputItem):
    delta_event = "response.function_call_arguments.delta"

    def __init__(self, item_id: str, call_id: str, tool: ToolIdentity) -> None:
        super().__init__(item_id)
        self._call_id = call_id
        self._tool = tool

    def json(self, status: ItemStatus) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            **_call_fields(self._call_id, self._tool),
            "arguments": self.text,
        }

    def opening(self) -> Sequence[Event]:
        return []

    def closing(self) -> Sequence[Event]:
        return [("response.function_call_arguments.done", {"arguments": self.text})]


class CustomCallItem(OutputItem):
    """A call to a custom tool. The model writes the tool's input as JSON, so the input is sent in
    one piece once it is complete."""

    delta_event = ""

    def __init__(self, item_id: str, call_id: str, tool: ToolIdentity) -> None:
        super().__init__(item_id)
        self._call_id = call_id
        self._tool = tool

    def json(self, status: ItemStatus) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "custom_tool_call",
            **_call_fields(self._call_id, self._tool),
            "input": "" if status == "in_progress" else decode_custom_arguments(self.text),
        }

    def opening(self) -> Sequence[Event]:
        return []

    def closing(self) -> Sequence[Event]:
        text = decode_custom_arguments(self.text)
        return [
            ("response.custom_tool_call_input.delta", {"delta": text}),
            ("response.custom_tool_call_input.done", {"input": text}),
        ]


def _text_part(text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _call_fields(call_id: str, tool: ToolIdentity) -> dict[str, Any]:
    fields = {"call_id": call_id, "name": tool.name}
    return fields if tool.namespace is None else {**fields, "namespace": tool.namespace}


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Options for the items of one response. ``call_id`` makes a call's id from the call's index.
    ``tools`` has the names that the client uses for its tools, by function name."""

    response_id: str
    tools: Mapping[str, ToolIdentity]
    call_id: Callable[[int], str]
    summarizes_reasoning: bool = False
    encrypts_reasoning: bool = False


class OutputItems:
    """The items so far. The last item is open: it takes parts until a part of another kind
    arrives."""

    def __init__(self, options: OutputOptions) -> None:
        self._options = options
        self.items: list[OutputItem] = []

    def take(self, part: OutputPart) -> tuple[OutputItem, str]:
        """Return the item that a part belongs to, and the part's text, which the caller appends to
        the item. If the part does not belong to the last item, a new item is opened."""
        match part:
            case TextPart(text):
                return self._item_for(MessageItem), text
            case ReasoningPart(text):
                return self._item_for(ReasoningItem), text
            case ToolCallStart(index, name):
                return self._add(self._new_call(index, name)), ""
            case ToolCallArguments(_, arguments):
                return self.items[-1], arguments

    def _item_for(self, kind: type[OutputItem]) -> OutputItem:
        if self.items and isinstance(self.items[-1], kind):
            return self.items[-1]
        return self._add(self._new_message() if kind is MessageItem else self._new_reasoning())

    def _add(self, item: OutputItem) -> OutputItem:
        self.items.append(item)
        return item

    def _new_message(self) -> OutputItem:
        return MessageItem(self._new_id("message"))

    def _new_reasoning(self) -> OutputItem:
        options = self._options
        kind = ReasoningSummaryItem if options.summarizes_reasoning else ReasoningItem
        return kind(self._new_id("reasoning"), encrypts=options.encrypts_reasoning)

    def _new_call(self, index: int, name: str) -> OutputItem:
        tool = self._options.tools.get(name) or ToolIdentity(name)
        call_id = self._options.call_id(index)
        if tool.is_custom:
            return CustomCallItem(self._new_id("custom_tool_call"), call_id, tool)
        return FunctionCallItem(self._new_id("function_call"), call_id, tool)

    def _new_id(self, kind: str) -> str:
        return make_item_id(kind, self._options.response_id, str(len(self.items)))
