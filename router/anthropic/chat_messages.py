"""Turns the system prompt and the messages of a request into the messages of a chat."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.anthropic.schema.content_block import (
    CacheControl,
    MessageParam,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from router.errors import invalid_field
from router.serving.cache_breakpoints import MAX_BREAKPOINTS
from router.serving.schema.message import Breakpoint, Message

PARAGRAPH = "\n\n"
"""Separates the text blocks of a turn. The assistant's blocks are pieces of one text, so nothing
separates them."""

BILLING_HEADER = "x-anthropic-billing-header:"
"""A system block that begins like this is for Anthropic's accounting. It differs in each request,
so no prefix would be cached if it were in the prompt."""

ERROR_MARK = "Error:"
"""Precedes the result of a tool that failed, since a chat has no flag for failures."""

SYSTEM_SOURCE = "system"


@dataclass(slots=True)
class _Draft:
    """A message of the chat, to which blocks are still added. ``source`` is the field of the
    request that the message comes from."""

    role: str
    source: str
    tool_call_id: str | None = None
    pieces: list[str] = field(default_factory=list)
    num_characters: int = 0
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    breakpoints: list[Breakpoint] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.num_characters or self.reasoning or self.tool_calls)

    def add_text(self, text: str) -> None:
        if self.num_characters and text and self.role != "assistant":
            text = PARAGRAPH + text
        self.pieces.append(text)
        self.num_characters += len(text)

    def add_breakpoint(self, seconds: float) -> None:
        """Add a breakpoint after the text so far. If there is already one at this position, only
        the longer of the two times to live is kept."""
        position = self.num_characters
        if self.breakpoints and self.breakpoints[-1][0] == position:
            seconds = max(seconds, self.breakpoints.pop()[1])
        self.breakpoints.append((position, seconds))

    @property
    def json(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": "".join(self.pieces)}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        return message


class ChatMessages:
    """Collects the messages of a chat. Call :meth:`add_tools` and :meth:`add_system` before the
    first :meth:`add_message`. Adjacent messages of one role become one; each tool result becomes a
    message of role ``tool``, and the results of a message come before its text.

    A cache breakpoint (``cache_control``) after the tools, after the whole system prompt or after a
    tool call is moved to the beginning of the next message. The reason is the order in templates:
    some put the tools before the system prompt and others after it, and a message's tool calls come
    after its text."""

    def __init__(self) -> None:
        self._drafts: list[_Draft] = []
        self._pending_seconds = 0.0
        self._num_breakpoints = 0

    def add_tools(self, controls: Iterable[CacheControl | None]) -> None:
        for control in controls:
            self._break_before_next(control)

    def add_system(self, blocks: Sequence[TextBlock]) -> None:
        shown = [block for block in blocks if not block.text.startswith(BILLING_HEADER)]
        if not shown:
            return
        draft = _Draft("system", SYSTEM_SOURCE)
        self._drafts.append(draft)
        for block in shown:
            draft.add_text(block.text)
            self._break_after(draft, block.cache_control)
        if draft.breakpoints and draft.breakpoints[-1][0] == draft.num_characters:
            self._pending_seconds = max(self._pending_seconds, draft.breakpoints.pop()[1])

    def add_message(self, message: MessageParam, source: str) -> None:
        for block in message.content:
            if isinstance(block, ToolResultBlock):
                self._add_result(block, source)
        draft = None
        for block in message.content:
            if isinstance(block, ToolResultBlock):
                continue
            draft = draft or self._open(message.role, source)
            match block:
                case TextBlock():
                    draft.add_text(block.text)
                    self._break_after(draft, block.cache_control)
                case ThinkingBlock():
                    draft.reasoning.append(block.thinking)
                case ToolUseBlock():
                    draft.tool_calls.append(_tool_call(block))
                    self._break_before_next(block.cache_control)

    def add_final_breakpoint(self, control: CacheControl) -> None:
        """Add a breakpoint after the last message."""
        if self._drafts:
            self._break_after(self._drafts[-1], control)

    def drop_empty_continuation(self) -> None:
        """Drop the last message if it is an empty message of the assistant, which has no text to
        continue."""
        if self.ends_with_assistant and self._drafts[-1].is_empty:
            self._drafts.pop()

    @property
    def ends_with_assistant(self) -> bool:
        return bool(self._drafts) and self._drafts[-1].role == "assistant"

    @property
    def can_be_continued(self) -> bool:
        """Whether the last message has text and no tool calls."""
        last = self._drafts[-1]
        return bool(last.num_characters) and not last.tool_calls

    @property
    def sources(self) -> list[str]:
        """The field of the request that each message's text comes from. For merged messages, it is
        the field of the first one."""
        sources = (draft.source for draft in self._drafts)
        return [each if each == SYSTEM_SOURCE else f"{each}.content" for each in sources]

    @property
    def json(self) -> list[dict[str, Any]]:
        """The messages in OpenAI's form, without breakpoints."""
        return [draft.json for draft in self._drafts]

    def mark_breakpoints(self, messages: Sequence[Message]) -> None:
        """Set the breakpoints of the chat's messages. Raises ApiError (400) for too many."""
        if not self._num_breakpoints:
            return
        if self._num_breakpoints > MAX_BREAKPOINTS:
            raise invalid_field(
                "cache_control",
                f"at most {MAX_BREAKPOINTS} blocks may have cache_control, not "
                f"{self._num_breakpoints}",
            )
        for message, draft in zip(messages, self._drafts, strict=True):
            message.set_breakpoints(draft.breakpoints)

    def _open(self, role: str, source: str, tool_call_id: str | None = None) -> _Draft:
        """Return the message to which blocks of this role are added: the last one if it has the
        same role, else a new one."""
        if self._drafts and self._drafts[-1].role == role != "tool":
            return self._drafts[-1]
        draft = _Draft(role, source, tool_call_id)
        self._drafts.append(draft)
        if self._pending_seconds:
            draft.add_breakpoint(self._pending_seconds)
            self._pending_seconds = 0.0
        return draft

    def _add_result(self, block: ToolResultBlock, source: str) -> None:
        draft = self._open("tool", source, block.tool_use_id)
        if block.is_error:
            draft.add_text(ERROR_MARK)
        for part in block.content:
            draft.add_text(part.text)
            self._break_after(draft, part.cache_control)
        self._break_after(draft, block.cache_control)

    def _break_after(self, draft: _Draft, control: CacheControl | None) -> None:
        if control is not None:
            self._num_breakpoints += 1
            draft.add_breakpoint(control.seconds)

    def _break_before_next(self, control: CacheControl | None) -> None:
        if control is not None:
            self._num_breakpoints += 1
            self._pending_seconds = max(self._pending_seconds, control.seconds)


def _tool_call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": block.input}
    return {"id": block.id, "type": "function", "function": function}
