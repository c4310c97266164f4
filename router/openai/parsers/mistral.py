"""Calls as Mistral's models write them: a list of objects, or a name and its arguments.

[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]
[TOOL_CALLS]f[ARGS]{"x": 1}
"""

import re
import string

from router.openai.parsers.json_call_reader import JsonCallReader, JsonValueScanner
from router.openai.parsers.tool_call_parser import ToolCallParser

_HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")

MAX_HEAD_CHARACTERS = 256
"""Of a name and an id before the arguments."""


class MistralToolParser(ToolCallParser):
    marker = "[TOOL_CALLS]"
    is_special = True

    def __init__(self) -> None:
        super().__init__()
        self._value = JsonValueScanner()

    def _opened(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith("["):
            self._held = rest[1:]
            self._state = self._after_object
            return True
        head = _HEAD.match(rest)
        if head is not None:
            self._begin(head[1])
            self._value = JsonValueScanner()
            self._held = rest[head.end() :]
            self._state = self._in_arguments
            return True
        if len(rest) <= MAX_HEAD_CHARACTERS and "{" not in rest:
            return False
        self._refuse("", rest)
        return True

    def _after_object(self) -> bool:
        """In the list."""
        rest = self._held.lstrip(string.whitespace + ",")
        if rest.startswith("{"):
            self._opening, self._held = "" if self.num_calls else "[", rest
            return self._open_object(JsonCallReader())
        return self._leave(rest.removeprefix("]")) if rest else False

    def _in_arguments(self) -> bool:
        for position, character in enumerate(self._held, start=1):
            if self._value.push(character):
                self._grow(self._held[:position])
                return self._leave(self._held[position:])
        self._grow(self._held)
        self._held = ""
        return False

    def _end(self) -> None:
        if self._state != self._after_object:
            super()._end()
