"""JSON and plain values that a model has written: parsed, typed by a schema, and repaired."""

import json
import math
import re
from collections.abc import Set
from typing import Any

import regex

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_model_json(text: str) -> Any:
    """Parse JSON. Raises ValueError if it is invalid or nested too deep, or has an unpaired
    surrogate, which can't be sent to a client."""
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("the value is nested too deep") from error
    return value


_TYPES_OF = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
    dict: "object", list: "array",
}  # fmt: skip
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def types_of(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows at its top level. Without any information the set
    is empty."""
    if not isinstance(schema, dict):
        return frozenset()
    kinds = schema.get("type")
    found = {kinds} if isinstance(kinds, str) else set(kinds or ()) if _is_names(kinds) else set()
    if not found:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        found = {_TYPES_OF[type(value)] for value in values if type(value) in _TYPES_OF}
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        for option in options if isinstance(options, list) else ():
            found |= types_of(option)
    return frozenset(found)


def _is_names(kinds: Any) -> bool:
    return isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)


def is_text(schema: Any) -> bool:
    """Return whether a value can only be a string. Values that no schema describes are strings."""
    return schema is None or types_of(schema) == {"string"}


def typed_json(text: str, schema: Any) -> str:
    """Return a value as JSON: of one of the schema's types if the text can be one, else a string.
    If the schema allows strings, too, only objects, lists and null are not strings."""
    return json.dumps(_typed(text, types_of(schema)), ensure_ascii=False)


def _typed(text: str, kinds: Set[str]) -> Any:
    stripped = text.strip()
    word = stripped.lower()
    if word in _WORDS:
        value = _WORDS[word]
        is_allowed = _is_allowed(value, kinds)
        return value if is_allowed and not (isinstance(value, bool) and "string" in kinds) else text
    if "string" in kinds and not stripped.startswith(("{", "[")):
        return text
    try:
        value = parse_model_json(stripped)
    except ValueError:
        return text
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite and _is_allowed(value, kinds) else text


def _is_allowed(value: Any, kinds: Set[str]) -> bool:
    kind = _TYPES_OF[type(value)]
    return not kinds or kind in kinds or (kind in ("integer", "number") and "number" in kinds)


_PLAIN = regex.compile(r'[^"\\\x00-\x1f]++')
_OUTSIDE = regex.compile(r"[\s\d+\-.,:]++")
_WORD = regex.compile(r"[A-Za-z_]++")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
MAX_WORD = 8
"""Longer words are copied as they arrive."""
_ESCAPED = frozenset('"\\/bfnrt')
_CLOSING = {"{": "}", "[": "]"}


class JsonRepairer:
    """Copies one JSON value, so that the copy is valid wherever the model's mistake is a common
    one: line breaks and other control characters within strings, escapes that JSON does not have
    (``\\d``, ``\\'``), and Python's True, False and None. Other mistakes are copied, except that a
    character which can't stand outside of strings, or a bracket that does not match, makes the
    value ``is_invalid``."""

    def __init__(self) -> None:
        self._closing: list[str] = []
        self._in_string = False
        self._pending = ""  # the start of an escape or of a word
        self._begun = ""
        self.is_done = False
        self.is_invalid = False

    def push(self, text: str, start: int = 0, end: int | None = None) -> tuple[str, int]:
        """Read ``text`` from ``start`` to ``end``, or to the end of the value. Return the copy, and
        the number of characters that were read."""
        end = len(text) if end is None else end
        skipped = len(self._pending)
        if skipped:
            text, start, end = self._pending + text[start:end], 0, skipped + end - start
            self._pending = ""
        copy: list[str] = []
        position = start
        while position < end and not (self.is_done or self.is_invalid):
            read = self._in_text if self._in_string else self._outside
            size = read(text, position, end, copy)
            if not size and not self.is_done:
                self._pending = text[position:end]
                position = end
            position += size
        return "".join(copy), max(0, position - start - skipped)

    def end(self) -> str:
        """End a value that is a number or word, which nothing else ends; return the rest of its
        copy."""
        word, self._pending = self._pending, ""
        self.is_done = not self._closing and not self._in_string and bool(self._begun)
        return _PYTHON_WORDS.get(word, word)

    def _outside(self, text: str, position: int, end: int, copy: list[str]) -> int:
        character = text[position]
        is_scalar = bool(self._begun) and not self._closing
        if is_scalar and character in ",}] \t\r\n":
            self.is_done = True
            return 0
        if word := _WORD.match(text, position, end):
            if word.end() == end and len(word[0]) < MAX_WORD:
                return 0
            self._begun = self._begun or "w"
            copy.append(_PYTHON_WORDS.get(word[0], word[0]))
            return len(word[0])
        if not is_scalar and (run := _OUTSIDE.match(text, position, end)):
            if self._closing:
                copy.append(run[0])
                return len(run[0])
            if character.isspace():
                copy.append(character)
                return 1
        copy.append(character)
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._closing.append(_CLOSING[character])
        elif character in "}]":
            if not self._closing or self._closing.pop() != character:
                self.is_invalid = True
            self.is_done = not self._closing
        elif not (character.isdigit() or character in "+-."):
            self.is_invalid = True
        self._begun = self._begun or character
        return 1

    def _in_text(self, text: str, position: int, end: int, copy: list[str]) -> int:
        if run := _PLAIN.match(text, position, end):
            copy.append(run[0])
            return len(run[0])
        character = text[position]
        if character == '"':
            copy.append(character)
            self._in_string = False
            self.is_done = not self._closing
            return 1
        if character != "\\":
            copy.append(_escape(character))
            return 1
        if position + 1 == end:
            return 0
        follower = text[position + 1]
        if follower == "u":
            digits = text[position + 2 : min(position + 6, end)]
            is_hex = all(digit in "0123456789abcdefABCDEF" for digit in digits)
            if is_hex and len(digits) < 4:
                return 0
            copy.append("\\u" + digits if is_hex else "\\\\u")
            return 6 if is_hex else 2
        if follower in _ESCAPED:
            copy.append("\\" + follower)
            return 2
        if follower == "'":
            copy.append("'")
            return 2
        copy.append("\\\\")  # the follower is read next
        return 1


def _escape(character: str) -> str:
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
    return short.get(character) or f"\\u{ord(character):04x}"
