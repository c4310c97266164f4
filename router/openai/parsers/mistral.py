"""Tool calls as Mistral's models write them: a list of objects, or a name and its arguments.

[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]
[TOOL_CALLS]f[ARGS]{"x": 1}
"""

import re
import string

from router.openai.parsers.held_whitespace import excess_whitespace
from router.openai.parsers.json_call_reader import JsonCallReader, JsonValueScanner
from router.openai.parsers.tool_call_parser import ToolCallParser

_HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")

MAX_HEAD_CHARACTERS = 256
"""The maximum length of what precedes a call's arguments: its name, its id, and white space."""


class MistralToolParser(ToolCallParser):
    marker = "[TOOL_CALLS]"
    is_special = True

    def __init__(self) -> None:
        super().__init__()
        self._value = JsonValueScanner()

    def _after_marker(self) -> bool:
        rest = self._held_text.lstrip()
        if rest.startswith("["):
            self._held_text = rest[1:]
            self._state = self._after_object
            return True
        head = _HEAD.match(rest)
        if head is not None and head.end() <= MAX_HEAD_CHARACTERS:
            self._emit_call_start(head[1])
            self._value = JsonValueScanner()
            self._held_text = rest[head.end() :]
            self._state = self._in_arguments
            return True
        if len(rest) <= MAX_HEAD_CHARACTERS and "{" not in rest:
            self._held_text = self._held_text[excess_whitespace(self._held_text) :]
            return False
        self._emit_as_text("", rest)
        return True

    def _after_object(self) -> bool:
        """Read what follows a call in the list: a comma, or the end of the list."""
        rest = self._held_text = self._held_text.lstrip(string.whitespace + ",")
        if rest.startswith("{"):
            self._opening = "" if self.num_calls else "["
            return self._open_object(JsonCallReader())
        return self._end_calls(rest.removeprefix("]")) if rest else False

    def _in_arguments(self) -> bool:
        for position, character in enumerate(self._held_text, start=1):
            if self._value.push(character):
                self._emit_arguments(self._held_text[:position])
                return self._end_calls(self._held_text[position:])
        self._emit_arguments(self._held_text)
        self._held_text = ""
        return False

    def _on_input_end(self) -> None:
        if self._state != self._after_object:
            super()._on_input_end()
