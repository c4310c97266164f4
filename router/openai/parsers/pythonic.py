"""Tool calls as Llama 3.2 and 4 write them: a list of Python calls, as the whole answer.

[f(x=1, y="a"), g()]
"""

import ast
import json
import re
import string
from collections.abc import Set
from typing import Any

from router.openai.parsers.held_whitespace import MAX_HELD_WHITESPACE
from router.openai.parsers.json_call_reader import MAX_HELD_CHARACTERS
from router.openai.parsers.tool_call_parser import ToolCallParser

MAX_DEPTH = 60
"""The maximum depth of nested values; Python's parser accepts no more than a few hundred levels."""

_GAP = rf"\s{{0,{MAX_HELD_WHITESPACE}}}+"
_HEAD = re.compile(rf"{_GAP}([\w.-]++){_GAP}\(")
_MAY_BE_HEAD = re.compile(rf"{_GAP}(?:[\w.-]{{1,64}}+{_GAP})?")
_WORDS = {"true": True, "false": False, "null": None}
_SPACE = string.whitespace


class BracketScanner:
    """Finds the end of a call by tracking its brackets and strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self.is_too_deep = False

    def push(self, character: str) -> bool:
        """Read a character. Returns whether it closes the outermost bracket."""
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = character == "\\"
            self._quote = "" if character == self._quote else self._quote
        elif character in "\"'":
            self._quote = character
        elif character in "([{":
            self._depth += 1
            self.is_too_deep = self.is_too_deep or self._depth > MAX_DEPTH
        elif character in ")]}":
            self._depth -= 1
            return self._depth <= 0
        return False


class PythonicToolParser(ToolCallParser):
    """Parses lists of calls. An answer is such a list only if it begins with a call of one of
    ``names``, the names of the tools. Each call is parsed once it is complete, since its values are
    written in Python, not in JSON."""

    marker = "\0"
    """A string that never occurs: in this format, no marker begins a call within text."""
    is_special = False

    def __init__(self, names: Set[str]) -> None:
        super().__init__()
        self._names = names
        self._state = self._at_start
        self._brackets = BracketScanner()
        self._scanned = 0

    def _at_start(self) -> bool:
        self._emit_excess_whitespace()
        rest = self._held_text.lstrip()
        if not rest or (rest.startswith("[") and _MAY_BE_HEAD.fullmatch(rest, 1)):
            return False
        head = _HEAD.match(rest, 1) if rest.startswith("[") else None
        if head is None or head[1] not in self._names:
            self._state = self._outside
            return True
        self._opening, self._held_text = self._held_text[: -len(rest)] + "[", rest[1:]
        self._state = self._in_list
        return True

    def _outside(self) -> bool:
        """Read the rest of the answer: all of it is text."""
        if self._after_call:
            self._held_text = self._held_text.lstrip()
            self._after_call = not self._held_text
        self._emit_text(self._held_text)
        self._held_text = ""
        return False

    def _after_marker(self) -> bool:
        raise AssertionError("the pythonic format has no marker before calls")

    def _after_object(self) -> bool:
        """Read what follows a call: a comma, or the end of the list."""
        rest = self._held_text = self._held_text.lstrip(_SPACE + ",")
        if not rest:
            return False
        if rest.startswith("]"):
            return self._end_calls(rest[1:])
        self._state = self._in_list
        return True

    def _in_list(self) -> bool:
        for position in range(self._scanned, len(self._held_text)):
            if self._brackets.push(self._held_text[position]):
                return self._end_call(position + 1)
        self._scanned = len(self._held_text)
        if self._brackets.is_too_deep or self._scanned > MAX_HELD_CHARACTERS:
            self._end_call(self._scanned)
        return False

    def _end_call(self, end: int) -> bool:
        raw, rest = self._held_text[:end], self._held_text[end:]
        call = None if self._brackets.is_too_deep else _parse_python_call(raw, self._names)
        self._brackets, self._scanned = BracketScanner(), 0
        if call is None:
            self._emit_as_text(raw, rest)
            return True
        self._emit_call_start(call[0])
        self._emit_arguments(call[1])
        self._opening, self._held_text, self._state = "", rest, self._after_object
        return True

    def _on_input_end(self) -> None:
        if self._state != self._after_object:
            super()._on_input_end()


def _parse_python_call(text: str, names: Set[str]) -> tuple[str, str] | None:
    """Return the call's name, and its arguments as JSON; None if the text does not call one of
    ``names``."""
    head = _HEAD.match(text)
    if head is None or head[1] not in names:
        return None
    try:
        call = ast.parse(f"f({text[head.end() :]}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {str(each.arg): _value(each.value) for each in call.keywords if each.arg}
        if len(values) < len(call.keywords):
            return None
        return head[1], json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    """Evaluate a literal of Python or JSON. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value) if value is None or isinstance(value, str | int | float):
            return _join_surrogates(value) if isinstance(value, str) else value
        case ast.Name(name) if name in _WORDS:
            return _WORDS[name]
        case ast.List(items) | ast.Tuple(items):
            return [_value(item) for item in items]
        case ast.Dict(keys, values):
            return {str(_key(key)): _value(item) for key, item in zip(keys, values, strict=True)}
        case ast.UnaryOp(ast.USub(), ast.Constant(int(value) | float(value))):
            return -value
    raise ValueError("the value is not a literal")


def _key(node: ast.expr | None) -> Any:
    """Evaluate a dict key. ``node`` is None for ``**``, which is refused."""
    if node is None:
        raise ValueError("``**`` is not allowed in a dict")
    return _value(node)


def _join_surrogates(text: str) -> str:
    """Join surrogate pairs: JSON escapes a character beyond 16 bits as two surrogates, which Python
    keeps apart. Raises ValueError for an unpaired surrogate."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16")
