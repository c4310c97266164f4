"""Tool calls as Llama 3.2 and 4 and LFM2 write them: a list of Python calls.

[f(x=1, y="a"), g()]
"""

import ast
import json
from dataclasses import dataclass
from typing import Any

from router.serving.parsers.answer_tape import (
    MAX_HELD_CHARACTERS,
    AnswerTape,
    Reading,
    compiled,
)
from router.serving.parsers.call_syntax import (
    WHITE_SPACE,
    CallSink,
    Outcome,
    Schemas,
    failed,
)

MAX_DEPTH = 60
"""The maximum depth of nested values; Python's parser accepts no more than a few hundred levels."""

_OPEN = compiled(r"\[")
_HEAD = compiled(r"(?P<name>[\w.\-]{1,256}+)\s{0,64}+\(")
_AFTER = compiled(r"[,\]]")
_WORDS = {"true": True, "false": False, "null": None}


class BracketScanner:
    """Finds the end of a call by tracking its brackets and strings. The call's first bracket is
    already open."""

    def __init__(self) -> None:
        self._depth = 1
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


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """A list of calls of offered tools. Each call is passed on once it is complete, since its
    values are written in Python, not in JSON."""

    def read(self, tape: AnswerTape, calls: CallSink, schemas: Schemas) -> Reading[Outcome]:
        yield from tape.skip(WHITE_SPACE)
        if (yield from tape.match(_OPEN)) is None:
            return failed(tape)
        while True:
            yield from tape.skip(WHITE_SPACE)
            head = yield from tape.match(_HEAD)
            if head is None or head["name"] not in schemas:
                return Outcome.NOT_A_CALL if head is not None else failed(tape)
            written = yield from _read_call(tape)
            if written is None:
                return Outcome.CUT if tape.has_ended else Outcome.NOT_A_CALL
            arguments = _parse_arguments(written)
            if arguments is None:
                return Outcome.NOT_A_CALL
            calls.begin(head["name"])
            calls.arguments(arguments)
            calls.end()
            yield from tape.skip(WHITE_SPACE)
            after = yield from tape.match(_AFTER)
            if after is None or after[0] == "]":
                return Outcome.DONE
            yield from tape.skip(WHITE_SPACE)
            tape.record()


def _read_call(tape: AnswerTape) -> Reading[str | None]:
    """Return the arguments and the closing bracket, or None if they are incomplete, nested too deep
    or too long."""
    brackets = BracketScanner()
    written: list[str] = []
    size = 0
    while (yield from tape.wait()):
        character = tape.take(1)
        written.append(character)
        if brackets.push(character):
            return "".join(written)
        size += 1
        if brackets.is_too_deep or size > MAX_HELD_CHARACTERS:
            return None
    return None


def _parse_arguments(written: str) -> str | None:
    """Return the arguments as JSON; None if they are not keyword arguments with literals."""
    try:
        call = ast.parse(f"f({written}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {str(each.arg): _value(each.value) for each in call.keywords if each.arg}
        if len(values) < len(call.keywords):
            return None
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
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
