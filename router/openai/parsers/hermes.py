"""Calls as Hermes, Qwen 2.5 and Qwen 3 write them, and those of Qwen3-Coder, in the same tags.

<tool_call>
{"name": "f", "arguments": {"x": 1}}
</tool_call>
"""

import string

from router.openai.parsers.json_call_reader import MAX_HELD_CHARACTERS, JsonCallReader
from router.openai.parsers.qwen3_coder import FUNCTION, Schemas, parse_xml_call
from router.openai.parsers.tool_call_parser import ToolCallParser

TOOL_CALL_END = "</tool_call>"


class HermesToolParser(ToolCallParser):
    """``schemas`` are the tools' own, by name: XML does not tell a number from a string."""

    marker = "<tool_call>"
    is_special = False

    def __init__(self, schemas: Schemas) -> None:
        super().__init__()
        self._schemas = schemas
        self._searched = 0

    def _opened(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith("{"):
            self._opening += self._held[: -len(rest)]
            self._held = rest
            return self._open_object(JsonCallReader())
        if rest.startswith(FUNCTION):
            self._searched = 0
            self._state = self._in_xml
            return True
        if FUNCTION.startswith(rest):
            return False
        self._refuse("", self._held)
        return True

    def _after_object(self) -> bool:
        """Some models close one brace too many."""
        rest = self._held.lstrip(string.whitespace + "}")
        if rest.startswith(TOOL_CALL_END):
            return self._leave(rest.removeprefix(TOOL_CALL_END))
        return False if TOOL_CALL_END.startswith(rest) else self._leave(rest)

    def _in_xml(self) -> bool:
        end = self._held.find(TOOL_CALL_END, self._searched)
        if end >= 0:
            raw, rest = self._held[:end], self._held[end + len(TOOL_CALL_END) :]
            if self._call_xml(raw):
                return self._leave(rest)
            self._refuse(raw + TOOL_CALL_END, rest)
            return True
        if len(self._held) > MAX_HELD_CHARACTERS:
            self._refuse(self._held, "")
        self._searched = max(0, len(self._held) - len(TOOL_CALL_END))
        return False

    def _call_xml(self, raw: str) -> bool:
        call = parse_xml_call(raw, self._schemas)
        if call is None:
            return False
        self._begin(call[0])
        self._grow(call[1])
        return True

    def _end(self) -> None:
        if self._state == self._after_object:
            return
        if self._state == self._in_xml and self._call_xml(self._held):
            return
        super()._end()
