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
    """The text that has arrived and has not been taken. Patterns are matched partially: a match
    that more text could still complete makes the reader wait for this text."""

    def __init__(self) -> None:
        self.text = ""
        self.has_ended = False
        self.is_cut = False
        """Whether the last :meth:`match` failed because the answer has ended."""
        self._taken: list[str] | None = None
        self._taken_size = 0

    def push(self, text: str) -> None:
        self.text += text.replace(END, "\ufffd")

    def end(self) -> None:
        self.text += END
        self.has_ended = True

    @property
    def is_at_end(self) -> bool:
        return self.text.startswith(END)

    def take(self, size: int) -> str:
        taken, self.text = self.text[:size], self.text[size:]
        if self._taken is not None:
            self._taken.append(taken)
            self._taken_size += size
        return taken

    def drop_rest(self) -> None:
        """Drop the rest of an answer that has ended."""
        self.text = END

    def record(self) -> None:
        """Remember what is taken from now on, until :meth:`forget` or the next call."""
        self._taken = []
        self._taken_size = 0

    def forget(self) -> str:
        """Return what has been taken since :meth:`record`, and remember no more."""
        taken, self._taken = "".join(self._taken or ()), None
        return taken

    def match(self, pattern: "regex.Pattern[str]") -> "Reading[regex.Match[str] | None]":
        """Take what the pattern matches at the front. Return None if it can't match there, or if
        more than MAX_HELD_CHARACTERS would be held back."""
        while True:
            found = pattern.match(self.text, partial=not self.has_ended)
            if found is None or not found.partial:
                if found is not None:
                    self.take(found.end())
                elif self.has_ended:
                    self.is_cut = pattern.match(self.text[:-1], partial=True) is not None
                return found
            if len(self.text) > MAX_HELD_CHARACTERS:
                return None
            yield

    def until(
        self, pattern: "regex.Pattern[str]", sink: Callable[[str], Any]
    ) -> "Reading[regex.Match[str] | None]":
        """Pass the text before the first match of the pattern to ``sink`` as it arrives, and take
        the match. At the end of the answer, return None, and leave only END."""
        while True:
            found = pattern.search(self.text, partial=not self.has_ended)
            end = len(self.text) - self.has_ended
            size = found.start() if found is not None else end
            if size:
                sink(self.take(size))
            if found is None and self.has_ended:
                return None
            if found is not None and not found.partial:
                self.take(found.end() - size)
                return found
            if len(self.text) > MAX_HELD_CHARACTERS:
                sink(self.take(1))
            else:
                yield

    def skip(self, pattern: "regex.Pattern[str]") -> Reading[None]:
        """Take what repetitions of the pattern, which must not match END, match at the front, as it
        arrives. While it is remembered, stop after MAX_HELD_CHARACTERS."""
        while (yield from self.wait()):
            found = pattern.match(self.text)
            size = found.end() if found is not None else 0
            if self._taken is not None:
                size = min(size, MAX_HELD_CHARACTERS + 1 - self._taken_size)
            if size <= 0:
                return
            self.take(size)

    def wait(self) -> Reading[bool]:
        """Wait for a character. Return False at the end of the answer."""
        while not self.text:
            yield
        return not self.is_at_end
