"""Reads one tool call, which is written as a JSON object, while it arrives."""

from collections.abc import Set

from router.openai.parsers.model_json import parse_model_json

NAME_KEYS = frozenset({"name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
IGNORED_KEYS = frozenset({"id", "type"})

MAX_HELD_CHARACTERS = 65_536
"""The maximum number of characters that are held back while they may still become a call. Longer
input is treated as text."""

_SPACE = " \t\r\n"


class NotAToolCall(Exception):
    """The text that was read is not a tool call. ``text`` is all of this text; its last
    ``num_used`` characters were passed to the last :meth:`JsonCallReader.push`."""

    def __init__(self, raw: str, used: int) -> None:
        super().__init__("the text is not a tool call")
        self.text = raw
        self.num_used = used


class JsonValueScanner:
    """Finds the end of one JSON value by tracking its brackets and strings. Does not check that the
    value is valid."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._first = ""

    @property
    def is_scalar(self) -> bool:
        """Whether the value is a number, ``true``, ``false`` or ``null``. Such a value is known to
        be complete only once the next character has been read."""
        return bool(self._first) and self._first not in '{["'

    def push(self, character: str) -> bool:
        """Read a character. Returns whether it completes the value."""
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
    """Reads ``{"name": …, "arguments": {…}}``, with the keys in any order; ``arguments`` may be
    called ``parameters``.

    ``names`` is None if a marker such as ``<tool_call>`` came before the object. Without a marker,
    ``names`` are the names of the tools; then the object is a call only if it names one of the
    tools, has arguments, and has no keys except the name, the arguments, ``id`` and ``type``.

    Call :meth:`push` until ``is_done``. Once ``has_begun`` is True, the object counts as a call
    however it ends, and :meth:`take_arguments` returns the new part of its arguments."""

    def __init__(self, names: Set[str] | None = None) -> None:
        self._names = names
        self._state = self._open
        self._raw: list[str] = []
        self._value_text: list[str] = []
        self._key = ""
        self._value = JsonValueScanner()
        self._pending_arguments: str | None = None
        self._streams_value = False
        self._new_arguments: list[str] = []
        self.name: str | None = None
        self.has_begun = False
        self.is_done = False

    def push(self, text: str) -> int:
        """Read text and return how many of its characters belong to the call. Raises NotAToolCall
        if the text is not a call."""
        for position, character in enumerate(text):
            if not self.has_begun:
                self._raw.append(character)
                if len(self._raw) > MAX_HELD_CHARACTERS:
                    raise NotAToolCall("".join(self._raw), position + 1)
            if not self._state(character):
                if not self.has_begun:
                    raise NotAToolCall("".join(self._raw), position + 1)
                self.is_done = True
                return position
            if self.is_done:
                return position + 1
        return len(text)

    def take_arguments(self) -> str:
        new_arguments = "".join(self._new_arguments)
        self._new_arguments.clear()
        return new_arguments

    def flush(self) -> None:
        """End the input. Raises NotAToolCall unless the call has begun."""
        if not self.has_begun:
            raise NotAToolCall("".join(self._raw), 0)

    # -- states: each reads one character, and returns whether it is valid there ------------------

    def _open(self, character: str) -> bool:
        self._state = self._key_or_end
        return character == "{"

    def _key_or_end(self, character: str) -> bool:
        if character == "}":
            return self._end_object()
        if character != '"':
            return character in _SPACE
        self._begin_value(character)
        self._state = self._in_key
        return True

    def _in_key(self, character: str) -> bool:
        self._value_text.append(character)
        if not self._value.push(character):
            return True
        key = _decoded(self._value_text)
        self._state = self._colon
        self._key = key if isinstance(key, str) else ""
        return self._names is None or self._key in NAME_KEYS | ARGUMENT_KEYS | IGNORED_KEYS

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._state = self._before_value
            return True
        return character in _SPACE

    def _before_value(self, character: str) -> bool:
        if character in _SPACE:
            return True
        self._begin_value(character)
        self._streams_value = (
            character == "{" and not self.has_begun
            and self._key in ARGUMENT_KEYS and self.name is not None
        )  # fmt: skip
        if self._streams_value:
            self._begin_call(character)
        self._state = self._in_value
        return character not in ",}]:"

    def _in_value(self, character: str) -> bool:
        if self._value.is_scalar and character in ",}" + _SPACE:
            return self._end_value(_decoded(self._value_text)) and self._after_value(character)
        if self._streams_value:
            self._new_arguments.append(character)
        elif not self.has_begun:  # later values are ignored, however long they are
            self._value_text.append(character)
        if not self._value.push(character):
            return True
        if not self._streams_value:
            return self._end_value(_decoded(self._value_text))
        self._streams_value = False
        self._state = self._after_value
        return True

    def _after_value(self, character: str) -> bool:
        self._state = self._after_value
        if character == "}":
            return self._end_object()
        if character == ",":
            self._state = self._key_or_end
            return True
        return character in _SPACE

    # -- what the states do ----------------------------------------------------------------------

    def _begin_value(self, character: str) -> None:
        self._value = JsonValueScanner()
        self._value.push(character)
        self._value_text = [character]

    def _end_value(self, value: object) -> bool:
        """Handle a complete value. Returns whether the object can still be a call."""
        self._state = self._after_value
        if self.has_begun:
            return True
        if self._key in NAME_KEYS:
            if not isinstance(value, str) or (self._names is not None and value not in self._names):
                return False
            self.name = value
            if self._pending_arguments is not None:
                self._begin_call(self._pending_arguments)
        elif self._key in ARGUMENT_KEYS:
            arguments = _arguments(value, "".join(self._value_text))
            if self.name is None:
                self._pending_arguments = arguments
            else:
                self._begin_call(arguments)
        return True

    def _begin_call(self, arguments: str) -> None:
        self.has_begun = True
        self._raw.clear()
        self._new_arguments.append(arguments)

    def _end_object(self) -> bool:
        self.is_done = True
        if not self.has_begun and self.name and self._names is None:
            self._begin_call("{}")
        return self.has_begun


def _decoded(word: list[str]) -> object:
    """Decode JSON. Returns None if it is invalid."""
    try:
        return parse_model_json("".join(word))
    except ValueError:
        return None


def _arguments(value: object, raw: str) -> str:
    """Return the arguments as JSON. Some models write the object as a string, or null for no
    arguments."""
    if isinstance(value, str):
        return value or "{}"
    return "{}" if value is None and raw == "null" else raw
