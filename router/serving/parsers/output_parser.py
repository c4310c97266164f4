"""Splits an answer's text into reasoning, text and tool calls, as it arrives."""

import regex

from router.serving.parsers.answer_tape import (
    MAX_HELD_CHARACTERS,
    SPACE,
    AnswerTape,
    Reading,
    compiled,
)
from router.serving.parsers.call_syntax import WHITE_SPACE, CallSyntax, Outcome, Schemas, read_json
from router.serving.parsers.harmony import read_header
from router.serving.parsers.marks import Segment, mark_set, within
from router.serving.parsers.output_parts import (
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)
from router.serving.parsers.reasoning_formats import ReasoningFormat
from router.serving.parsers.tool_formats import ToolFormat

MAX_HELD_WHITESPACE = 4096
"""The maximum number of characters of white space that are held back at one place. Models write a
few of them around calls and reasoning, but a client can force any number with ``logit_bias``; and
each token of an answer costs time and memory in proportion to what is held back."""


class OutputParser:
    """Reads an answer in the formats of its model. The parts, joined, do not depend on how the text
    is cut into pushes. A mark counts only where the format allows it: within a string, or a value
    that has not ended by the format's rules, it is text.

    Without ``tools``, calls are text; without ``reasoning``, reasoning is. If ``in_reasoning`` is
    True, the prompt has already opened a reasoning section. ``max_calls`` limits the number of
    calls; None means no limit. When a call beyond it begins, ``has_enough_calls`` is set, and the
    rest of the answer can be skipped.

    ``cut_calls`` are the indexes of calls that are malformed or not complete when the answer ends.
    They must not be run: an answer that is sent as a whole does not have them, and
    ``has_tool_calls`` does not count them. A call that is cut off before its arguments is dropped.
    A mark that begins no call is text.

    White space next to reasoning is dropped. White space around calls is dropped unless there is
    text before it and after it. At most MAX_HELD_WHITESPACE characters of it are held back."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        schemas: Schemas,
        *,
        in_reasoning: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._schemas = schemas
        self._reasoning_marks = () if reasoning is None else reasoning.marks
        self._tool_marks = () if tools is None else tools.marks
        self._max_calls = max_calls
        self._tape = AnswerTape()
        self._parts: list[OutputPart] = []
        self._whitespace = ""
        self._begins_section = False
        self._has_text = False
        self._is_after_call = False
        self._num_begun = 0
        self._num_ended = 0
        self.cut_calls: list[int] = []
        self._held_brace = ""
        self.is_in_reasoning = in_reasoning
        self.has_enough_calls = False
        self._reading = self._read()
        next(self._reading, None)

    @property
    def has_tool_calls(self) -> bool:
        """Whether the answer has a complete call."""
        return self._num_ended > 0

    def push(self, text: str) -> list[OutputPart]:
        self._tape.push(text)
        return self._advance()

    def flush(self) -> list[OutputPart]:
        """End the answer and return the parts that were held back."""
        self._tape.end()
        return self._advance()

    def _advance(self) -> list[OutputPart]:
        if not self.has_enough_calls:
            next(self._reading, None)
        parts, self._parts = self._parts, []
        return parts

    # -- segments --------------------------------------------------------------------------------

    def _read(self) -> Reading[None]:
        segment = Segment.START
        while True:
            match segment:
                case Segment.START:
                    segment = yield from self._start()
                case Segment.ANSWER:
                    segment = yield from self._answer()
                case Segment.THOUGHT:
                    segment = yield from self._thought()
                case Segment.HEADER:
                    segment = yield from self._header()
                case _:
                    segment = yield from self._until_mark(segment)
            if self._tape.has_ended and self._tape.is_at_end:
                break
        if self._whitespace and not self._is_after_call:
            self._add(TextPart(self._whitespace))

    def _start(self) -> Reading[Segment]:
        """Read the mark that opens reasoning, which the prompt may have opened already."""
        reasoning = self._reasoning
        if reasoning is None:
            return Segment.ANSWER
        if reasoning.starts_with_header:
            return Segment.HEADER
        in_reasoning = self.is_in_reasoning
        if in_reasoning:
            yield from self._tape.skip(WHITE_SPACE)
        opens = compiled(SPACE + regex.escape(reasoning.opens))
        in_reasoning = (yield from self._tape.match(opens)) is not None or in_reasoning
        self._begins_section = in_reasoning
        return Segment.THOUGHT if in_reasoning else Segment.ANSWER

    def _answer(self) -> Reading[Segment]:
        """Read the beginning of the text, which may be a call that no mark announces."""
        self.is_in_reasoning = False
        tools = self._tools
        if tools is None or tools.unannounced is None:
            return Segment.TEXT
        begins = yield from self._tape.match(compiled(f"{SPACE}(?={tools.unannounced_begins})"))
        if begins is None:
            return Segment.TEXT
        return (yield from self._call(tools.unannounced, begins[0], is_announced=False))

    def _thought(self) -> Reading[Segment]:
        """Read reasoning up to its closing mark. A call within reasoning counts only if the
        reasoning is never closed, so it is held back until this is known, or until it is too
        long."""
        self.is_in_reasoning = True
        closing = within(Segment.THOUGHT, self._reasoning_marks)
        opening = within(Segment.TEXT, self._tool_marks)
        calls = tuple(mark for mark in opening if mark.opens is not Segment.TEXT)
        marks = mark_set(closing + calls)
        found = yield from self._tape.until(marks.pattern, self._emit_reasoning)
        if found is not None and marks.mark_of(found) in calls:
            held = [found[0]]
            size = 0

            def hold(text: str) -> None:
                nonlocal size
                held.append(text)
                size += len(text)
                if size > MAX_HELD_CHARACTERS:
                    self._emit_reasoning("".join(held))
                    held.clear()

            marks = mark_set(closing)
            found = yield from self._tape.until(marks.pattern, hold)
            if found is None:
                self._tape.put_back("".join(held) if size <= MAX_HELD_CHARACTERS else "")
                return self._end_section(Segment.TEXT)
            self._emit_reasoning("".join(held))
        opened = Segment.TEXT if found is None else marks.mark_of(found).opens
        return self._end_section(opened)

    def _header(self) -> Reading[Segment]:
        """Read the header of a message (Harmony), and the message if it is a call."""
        message = yield from read_header(self._tape)
        if message is None:
            return self._end_section(Segment.TEXT)
        if message.function is not None and self._tools is not None:
            self._end_section(Segment.TEXT)
            self.begin(message.function)
            if (yield from read_json(self._tape, self.arguments)):
                self.end()
            else:
                self._cut()
            return Segment.GAP
        if message.is_reasoning:
            self._begins_section = True
            return Segment.THOUGHT
        return self._end_section(Segment.TEXT if message.is_shown else Segment.GAP)

    def _until_mark(self, segment: Segment) -> Reading[Segment]:
        """Read text, or a gap whose text is not shown, up to the next mark."""
        marks = mark_set(within(segment, self._reasoning_marks + self._tool_marks))
        sink = self._emit_text if segment is Segment.TEXT else _ignore
        found = yield from self._tape.until(marks.pattern, sink)
        if found is None:
            return segment
        mark = marks.mark_of(found)
        if mark.opens is not Segment.CALL:
            self._begins_section = mark.opens is Segment.THOUGHT
            return mark.opens
        assert self._tools is not None
        return (yield from self._call(self._tools.syntax, found[0], is_shown=mark.is_shown))

    def _call(
        self, syntax: CallSyntax, opening: str, *, is_announced: bool = True, is_shown: bool = True
    ) -> Reading[Segment]:
        """Read calls behind ``opening``, which is text if no call follows, unless it is a special
        token, which is never shown."""
        assert self._tools is not None
        num_before = self._num_begun
        self._tape.record()
        outcome = yield from syntax.read(self._tape, self, self._schemas)
        raw = self._tape.forget()
        if outcome is Outcome.DONE:
            return self._tools.after_calls
        has_calls = self._num_begun > num_before
        if outcome is Outcome.NOT_A_CALL or not (is_announced or has_calls):
            self._emit_text((opening if is_shown and not has_calls else "") + raw)
            return Segment.TEXT
        if self._tape.is_cut:
            self._tape.drop_rest()
        if self.has_begun:
            self._cut()
        self._is_after_call = True
        return Segment.TEXT

    def _end_section(self, segment: Segment) -> Segment:
        self.is_in_reasoning = False
        self._begins_section = True
        self._whitespace = ""
        return segment

    # -- the calls that a syntax reads (CallSink) ------------------------------------------------

    @property
    def has_begun(self) -> bool:
        return self._num_begun > self._num_ended + len(self.cut_calls)

    def begin(self, name: str) -> None:
        self._tape.forget()
        self._is_after_call = True
        if not self._has_text:
            self._whitespace, self._begins_section = "", True
        if self._max_calls is not None and self._num_begun >= self._max_calls:
            self.has_enough_calls = True
        self._num_begun += 1
        self._add(ToolCallStart(self._num_begun - 1, name))

    def arguments(self, text: str) -> None:
        """Pass on arguments. Their last brace is held back until the call is complete, so that what
        a client gets of a call that is cut off is never valid JSON."""
        text = self._held_brace + text
        self._held_brace = "}" if text.endswith("}") else ""
        if text := text.removesuffix("}") if self._held_brace else text:
            self._add(ToolCallArguments(self._num_begun - 1, text))

    def end(self) -> None:
        if self._held_brace:
            self._add(ToolCallArguments(self._num_begun - 1, self._held_brace))
        self._held_brace = ""
        self._num_ended += 1

    def _cut(self) -> None:
        self._held_brace = ""
        self.cut_calls.append(self._num_begun - 1)

    # -- parts -----------------------------------------------------------------------------------

    def _emit_text(self, text: str) -> None:
        self._emit(text, TextPart)

    def _emit_reasoning(self, text: str) -> None:
        self._emit(text, ReasoningPart)

    def _emit(self, text: str, kind: type[TextPart] | type[ReasoningPart]) -> None:
        """Emit text, but hold back the white space at its end: what follows decides whether it
        belongs to a mark. White space at the beginning of a section is dropped."""
        if self._begins_section:
            text = text.lstrip()
        if not text:
            return
        self._begins_section = False
        text = self._whitespace + text
        size = max(len(text.rstrip()), len(text) - MAX_HELD_WHITESPACE)
        self._whitespace = text[size:]
        if size:
            self._add(kind(text[:size]))
            self._is_after_call = False
            self._has_text = self._has_text or kind is TextPart

    def _add(self, part: OutputPart) -> None:
        if self.has_enough_calls:
            return
        last = self._parts[-1] if self._parts else None
        match last, part:
            case TextPart(text), TextPart(more):
                self._parts[-1] = TextPart(text + more)
            case ReasoningPart(text), ReasoningPart(more):
                self._parts[-1] = ReasoningPart(text + more)
            case ToolCallArguments(index, text), ToolCallArguments(same, more) if index == same:
                self._parts[-1] = ToolCallArguments(index, text + more)
            case _:
                self._parts.append(part)


def _ignore(text: str) -> None:
    """Drop text between marks."""
