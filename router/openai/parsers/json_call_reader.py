"""One call, written as a JSON object, read as it arrives."""

import json
from collections.abc import Set

NAME_KEYS = frozenset({"name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
OTHER_KEYS = frozenset({"id", "type"})

MAX_HELD_CHARACTERS = 65_536
"""Before it is known to be a call; nobody waits longer for a name."""

_SPACE = " \t\r\n"


class NotAToolCall(Exception):
    """``raw`` is all that was read: it is text after all. ``used`` characters of it are from the
    last push."""

    def __init__(self, raw: str, used: int) -> None:
        super().__init__("not a call")
        self.raw = raw
        self.used = used


class JsonValueScanner:
    """Finds the end of one JSON value. Brackets and strings are all that it looks at: whoever reads
    the arguments judges the rest."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._first = ""

    @property
    def is_scalar(self) -> bool:
        """A number or a word: it ends before the character that follows it."""
        return bool(self._first) and self._first not in '{["'

    def push(self, character: str) -> bool:
        """Whether the value is complete with this character."""
        self._first = self._first or character
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        return not self.is_scalar and self._depth <= 0 and not self._in_string


class JsonCallReader:
    """``{"name": …, "arguments": {…}}``, with its keys in any order, or ``parameters`` instead.

    With ``names`` the object stands in plain text: only a call of one of them, with arguments and
    no keys of other things, is a call. :meth:`push` until ``done``; :meth:`take` what is new of the
    arguments once it has ``begun``, from when on nothing can make it text again.
    """

    def __init__(self, names: Set[str] | None = None) -> None:
        self._names = names
        self._state = self._open
        self._raw: list[str] = []
        self._word: list[str] = []
        self._key = ""
        self._value = JsonValueScanner()
        self._pending: str | None = None
        self._streams = False
        self._fresh: list[str] = []
        self.name: str | None = None
        self.begun = False
        self.done = False

    def push(self, text: str) -> int:
        """How many characters belong to it. Raises NotACall."""
        for position, character in enumerate(text):
            if not self.begun:
                self._raw.append(character)
                if len(self._raw) > MAX_HELD_CHARACTERS:
                    raise NotAToolCall("".join(self._raw), position + 1)
            if not self._state(character):
                if not self.begun:
                    raise NotAToolCall("".join(self._raw), position + 1)
                self.done = True
                return position
            if self.done:
                return position + 1
        return len(text)

    def take(self) -> str:
        fresh = "".join(self._fresh)
        self._fresh.clear()
        return fresh

    def close(self) -> None:
        """The text ends here. Raises NotACall unless it has begun."""
        if not self.begun:
            raise NotAToolCall("".join(self._raw), 0)

    # -- states: each takes a character, and says whether it belongs there -----------------------

    def _open(self, character: str) -> bool:
        self._state = self._key_or_end
        return character == "{"

    def _key_or_end(self, character: str) -> bool:
        if character == "}":
            return self._end()
        if character != '"':
            return character in _SPACE
        self._begin_value(character)
        self._state = self._in_key
        return True

    def _in_key(self, character: str) -> bool:
        self._word.append(character)
        if not self._value.push(character):
            return True
        key = _decoded(self._word)
        self._state = self._colon
        self._key = key if isinstance(key, str) else ""
        return self._names is None or self._key in NAME_KEYS | ARGUMENT_KEYS | OTHER_KEYS

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._state = self._before_value
            return True
        return character in _SPACE

    def _before_value(self, character: str) -> bool:
        if character in _SPACE:
            return True
        self._begin_value(character)
        self._streams = (
            character == "{" and not self.begun
            and self._key in ARGUMENT_KEYS and self.name is not None
        )  # fmt: skip
        if self._streams:
            self._begin(character)
        self._state = self._in_value
        return character not in ",}]:"

    def _in_value(self, character: str) -> bool:
        if self._value.is_scalar and character in ",}" + _SPACE:
            return self._keep(_decoded(self._word)) and self._after_value(character)
        if self._streams:
            self._fresh.append(character)
        else:
            self._word.append(character)
        if not self._value.push(character):
            return True
        if not self._streams:
            return self._keep(_decoded(self._word))
        self._streams = False
        self._state = self._after_value
        return True

    def _after_value(self, character: str) -> bool:
        self._state = self._after_value
        if character == "}":
            return self._end()
        if character == ",":
            self._state = self._key_or_end
            return True
        return character in _SPACE

    # -- what the states do ----------------------------------------------------------------------

    def _begin_value(self, character: str) -> None:
        self._value = JsonValueScanner()
        self._value.push(character)
        self._word = [character]

    def _keep(self, value: object) -> bool:
        """A value is complete. Whether there can still be a call."""
        self._state = self._after_value
        if self.begun:
            return True
        if self._key in NAME_KEYS:
            if not isinstance(value, str) or (self._names is not None and value not in self._names):
                return False
            self.name = value
            if self._pending is not None:
                self._begin(self._pending)
        elif self._key in ARGUMENT_KEYS:
            arguments = _arguments(value, "".join(self._word))
            if self.name is None:
                self._pending = arguments
            else:
                self._begin(arguments)
        return True

    def _begin(self, arguments: str) -> None:
        self.begun = True
        self._raw.clear()
        self._fresh.append(arguments)

    def _end(self) -> bool:
        self.done = True
        if not self.begun and self.name and self._names is None:
            self._begin("{}")
        return self.begun


def _decoded(word: list[str]) -> object:
    """None for what is no JSON, or too deep."""
    try:
        return json.loads("".join(word))
    except (ValueError, RecursionError):
        return None


def _arguments(value: object, raw: str) -> str:
    """As JSON: some models write the object as a string, or nothing for no arguments."""
    if isinstance(value, str):
        return value or "{}"
    return "{}" if value is None and raw == "null" else raw
