"""Sorts the parts of an answer into output items."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.openai.parsers.output_parts import (
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)
from router.responses.item_ids import make_item_id
from router.responses.output_item import (
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ReasoningSummaryItem,
)
from router.responses.tools import ToolIdentity


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
