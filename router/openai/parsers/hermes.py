"""Tool calls as Hermes, Qwen 2.5 and Qwen 3 write them. Qwen3-Coder writes XML in the same tags.

<tool_call>
{"name": "f", "arguments": {"x": 1}}
</tool_call>
"""

import string

from router.openai.parsers.held_whitespace import excess_whitespace
from router.openai.parsers.json_call_reader import MAX_HELD_CHARACTERS, JsonCallReader
from router.openai.parsers.qwen3_coder import FUNCTION, Schemas, parse_xml_call
from router.openai.parsers.tool_call_parser import ToolCallParser

TOOL_CALL_END = "</tool_call>"


class HermesToolParser(ToolCallParser):
    """Parses calls in ``<tool_call>`` tags. ``schemas`` are the tools' schemas by name: only they
    show whether an XML argument is a number or a string."""

    marker = "<tool_call>"
    is_special = False

    def __init__(self, schemas: Schemas) -> None:
        super().__init__()
        self._schemas = schemas
        self._searched = 0

    def _after_marker(self) -> bool:
        """Read the start of a call. After more than MAX_HELD_WHITESPACE characters of white space,
        the marker is text."""
        if excess_whitespace(self._held_text):
            self._emit_as_text("", self._held_text)
            return True
        rest = self._held_text.lstrip()
        if rest.startswith("{"):
            self._opening += self._held_text[: -len(rest)]
            self._held_text = rest
            return self._open_object(JsonCallReader())
        if rest.startswith(FUNCTION):
            self._searched = 0
            self._state = self._in_xml
            return True
        if FUNCTION.startswith(rest):
            return False
        self._emit_as_text("", self._held_text)
        return True

    def _after_object(self) -> bool:
        """Skip to the end tag. Some models write one closing brace too many; any number of braces
        and of white space is dropped as it arrives."""
        rest = self._held_text = self._held_text.lstrip(string.whitespace + "}")
        if rest.startswith(TOOL_CALL_END):
            return self._end_calls(rest.removeprefix(TOOL_CALL_END))
        return False if TOOL_CALL_END.startswith(rest) else self._end_calls(rest)

    def _in_xml(self) -> bool:
        end = self._held_text.find(TOOL_CALL_END, self._searched)
        if end >= 0:
            raw, rest = self._held_text[:end], self._held_text[end + len(TOOL_CALL_END) :]
            if self._call_xml(raw):
                return self._end_calls(rest)
            self._emit_as_text(raw + TOOL_CALL_END, rest)
            return True
        if len(self._held_text) > MAX_HELD_CHARACTERS:
            self._emit_as_text(self._held_text, "")
        self._searched = max(0, len(self._held_text) - len(TOOL_CALL_END))
        return False

    def _call_xml(self, raw: str) -> bool:
        call = parse_xml_call(raw, self._schemas)
        if call is None:
            return False
        self._emit_call_start(call[0])
        self._emit_arguments(call[1])
        return True

    def _on_input_end(self) -> None:
        if self._state == self._after_object:
            return
        if self._state == self._in_xml and self._call_xml(self._held_text):
            return
        super()._on_input_end()
