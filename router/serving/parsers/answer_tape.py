"""The text of an answer as it arrives: readers take it from the front, and wait for more."""

from collections.abc import Callable, Generator
from functools import cache
from typing import Any, TypeVar

import regex

Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""A reader. It yields whenever it needs more text, and returns its result."""

END = "\ufdd0"
"""Stands at the end of a complete answer, so that patterns can match the end. It is a noncharacter
of Unicode; one that a model writes is replaced."""

SPACE = r"\s{0,64}+"
"""White space in patterns. It is bounded, so that little is held back and matching is linear."""

MAX_HELD_CHARACTERS = 65_536
"""The maximum number of characters that are held back while they may still become markup. Longer
input is treated as text."""


@cache
def compiled(pattern: str) -> "regex.Pattern[str]":
    """Compile one of the patterns of the formats, of which there are only some."""
    return regex.compile(pattern)


class AnswerTape:
    """The text that has arrived; what precedes ``position`` has been taken. Patterns are matched
    partially: a match that more text could still complete makes the reader wait for this text."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.has_ended = False
        self.is_cut = False
        """Whether the last :meth:`match` failed because the answer has ended."""
        self._taken: list[str] | None = None
        self.taken_size = 0
        """The number of characters that are remembered (:meth:`record`)."""

    def push(self, text: str) -> None:
        self._append(text.replace(END, "\ufffd"))

    def end(self) -> None:
        self._append(END)
        self.has_ended = True

    def put_back(self, text: str) -> None:
        """Let ``text`` be read before what has not been taken."""
        self.text, self.position = text + self.text[self.position :], 0

    def _append(self, text: str) -> None:
        self.text, self.position = self.text[self.position :] + text, 0

    @property
    def size(self) -> int:
        """The number of characters that have arrived and have not been taken."""
        return len(self.text) - self.position

    @property
    def front(self) -> str:
        """The next character, which must have arrived (:meth:`wait`)."""
        return self.text[self.position]

    @property
    def is_at_end(self) -> bool:
        return self.text.startswith(END, self.position)

    def take(self, size: int) -> str:
        taken = self.text[self.position : self.position + size]
        self.position += size
        if self._taken is not None:
            self._taken.append(taken)
            self.taken_size += size
        return taken

    def drop_rest(self) -> None:
        """Drop the rest of an answer that has ended."""
        self.position = len(self.text) - len(END)

    def record(self) -> None:
        """Remember what is taken from now on, until :meth:`forget` or the next call."""
        self._taken = []
        self.taken_size = 0

    def forget(self) -> str:
        """Return what has been taken since :meth:`record`, and remember no more."""
        taken, self._taken = "".join(self._taken or ()), None
        self.taken_size = 0
        return taken

    def match(self, pattern: "regex.Pattern[str]") -> "Reading[regex.Match[str] | None]":
        """Take what the pattern matches at the front. Return None if it can't match there, or if
        more than MAX_HELD_CHARACTERS would be held back."""
        while True:
            found = pattern.match(self.text, self.position, partial=not self.has_ended)
            if found is None or not found.partial:
                if found is not None:
                    self.take(found.end() - self.position)
                elif self.has_ended:
                    end = len(self.text) - len(END)
                    begun = pattern.match(self.text, self.position, endpos=end, partial=True)
                    self.is_cut = begun is not None
                return found
            if self.size > MAX_HELD_CHARACTERS:
                return None
            yield

    def until(
        self, pattern: "regex.Pattern[str]", sink: Callable[[str], Any]
    ) -> "Reading[regex.Match[str] | None]":
        """Pass the text before the first match of the pattern to ``sink`` as it arrives, and take
        the match. At the end of the answer, return None, and leave only END."""
        while True:
            found = pattern.search(self.text, self.position, partial=not self.has_ended)
            end = found.start() if found is not None else len(self.text) - self.has_ended
            if end > self.position:
                sink(self.take(end - self.position))
            if found is None and self.has_ended:
                return None
            if found is not None and not found.partial:
                self.take(found.end() - self.position)
                return found
            if self.size > MAX_HELD_CHARACTERS:
                sink(self.take(1))
            else:
                yield

    def skip(self, pattern: "regex.Pattern[str]") -> Reading[None]:
        """Take what repetitions of the pattern, which must not match END, match at the front, as it
        arrives. While it is remembered, stop after MAX_HELD_CHARACTERS."""
        while (yield from self.wait()):
            found = pattern.match(self.text, self.position)
            size = found.end() - self.position if found is not None else 0
            if self._taken is not None:
                size = min(size, MAX_HELD_CHARACTERS + 1 - self.taken_size)
            if size <= 0:
                return
            self.take(size)

    def wait(self) -> Reading[bool]:
        """Wait for a character. Return False at the end of the answer."""
        while not self.size:
            yield
        return not self.is_at_end
