"""The marks between the segments of an answer."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import regex


class Segment(StrEnum):
    """START is the beginning of an answer, ANSWER what follows the reasoning, GAP text between
    marks that is not shown, and HEADER the header of a Harmony message."""

    START = "start"
    ANSWER = "answer"
    THOUGHT = "thought"
    TEXT = "text"
    GAP = "gap"
    CALL = "call"
    HEADER = "header"


@dataclass(frozen=True, slots=True)
class Mark:
    """A pattern that ends the segment ``within``, and begins the segment ``opens``. If ``is_shown``
    is True, a mark that should begin a call, but does not, is text."""

    pattern: str
    within: Segment
    opens: Segment
    is_shown: bool = False


def dropped(pattern: str) -> Mark:
    """A mark that is not shown, and changes nothing."""
    return Mark(pattern, Segment.TEXT, Segment.TEXT)


def within(segment: Segment, marks: Iterable[Mark]) -> tuple[Mark, ...]:
    """Return the marks that end the segment."""
    return tuple(mark for mark in marks if mark.within is segment)


@dataclass(frozen=True, slots=True)
class MarkSet:
    pattern: "regex.Pattern[str]"
    marks: tuple[Mark, ...]

    def mark_of(self, found: "regex.Match[str]") -> Mark:
        """Return the mark that a match of the pattern has found."""
        return next(
            mark for number, mark in enumerate(self.marks) if found[f"mark_{number}"] is not None
        )


@lru_cache(maxsize=512)
def mark_set(marks: tuple[Mark, ...]) -> MarkSet:
    """Return a pattern that matches any of the marks; without marks, it matches nothing."""
    each = [f"(?P<mark_{number}>{mark.pattern})" for number, mark in enumerate(marks)]
    return MarkSet(regex.compile("|".join(each) or r"(?!)"), marks)
