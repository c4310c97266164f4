"""Tool calls as Llama 3.1 to 3.3 write them: JSON as the whole answer, or after a special token.

{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}
"""

import string
from collections.abc import Set

from router.openai.parsers.held_whitespace import excess_whitespace
from router.openai.parsers.json_call_reader import JsonCallReader
from router.openai.parsers.tool_call_parser import ToolCallParser


class Llama3ToolParser(ToolCallParser):
    """Parses calls in JSON. An answer that begins with an object may be JSON that the client asked
    for, so the object is a call only if it calls one of ``names``, the names of the tools."""

    marker = "<|python_tag|>"
    is_special = True

    def __init__(self, names: Set[str]) -> None:
        super().__init__()
        self._names = names
        self._state = self._at_start
        self._has_tag = False

    def _at_start(self) -> bool:
        self._emit_excess_whitespace()
        rest = self._held_text.lstrip()
        if not rest:
            return False
        if rest.startswith("{"):
            self._opening, self._held_text = self._held_text[: -len(rest)], rest
            return self._open_object(JsonCallReader(self._names))
        self._state = self._outside
        return True

    def _after_marker(self) -> bool:
        """Read the start of a call. White space before it, or before text, is dropped."""
        rest = self._held_text.lstrip()
        if not rest:
            self._held_text = self._held_text[excess_whitespace(self._held_text) :]
            return False
        self._has_tag = True
        if not rest.startswith("{"):
            self._emit_as_text("", rest)
            return True
        self._held_text = rest
        return self._open_object(JsonCallReader())

    def _after_object(self) -> bool:
        rest = self._held_text = self._held_text.lstrip(string.whitespace + ";")
        if rest.startswith("{"):
            self._opening = ""
            return self._open_object(JsonCallReader(None if self._has_tag else self._names))
        return False if not rest else self._end_calls(rest)

    def _on_input_end(self) -> None:
        if self._state != self._after_object:
            super()._on_input_end()
