"""Reads a JSON value that a model writes, as it arrives, and mends what models often get wrong."""

import regex

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
