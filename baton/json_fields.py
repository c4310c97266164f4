"""A JSON object out of a file: each field is checked, and an error says where it stands."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from baton.errors import Invalid

MAX_SHOWN_CHARS = 60
"""Of a wrong value, in an error."""


@dataclass(frozen=True, slots=True)
class JsonFields:
    """``where`` begins every error: ``file:line``, or a file and the way to the object in it.

    All readers raise Invalid for a field that is missing or wrong."""

    where: str
    values: Mapping[str, object]

    def count(self, name: str, least: int, most: int) -> int:
        """A whole number in [least, most]."""
        value = self._value(name)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least:,} to {most:,}")
        return value

    def number(self, name: str) -> float:
        """A finite number, whole or not."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.wrong(name, "a finite number")
        return number

    def positive(self, name: str) -> float:
        """A finite number above 0."""
        number = self.number(name)
        if number <= 0:
            raise self.wrong(name, "above 0")
        return number

    def text(self, name: str, default: str | None = None) -> str:
        """A string; ``default`` where it is missing, if there is one."""
        if default is not None and name not in self.values:
            return default
        value = self._value(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        values = self._value(name)
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise self.wrong(name, "a list of whole numbers")
        return tuple(values)

    def rows(self, name: str) -> list["JsonFields"]:
        """A list of objects."""
        values = self._value(name)
        if not isinstance(values, list) or any(not isinstance(row, dict) for row in values):
            raise self.wrong(name, "a list of objects")
        return [JsonFields(f"{self.where}: {name}[{i}]", row) for i, row in enumerate(values)]

    def wrong(self, name: str, right: str) -> Invalid:
        """The error that says what ``name`` is and what would be right."""
        return Invalid(f"{self.where}: {name} is {_shown(self.values[name])}; it must be {right}")

    def _value(self, name: str) -> object:
        if name not in self.values:
            there = ", ".join(self.values) or "nothing"
            raise Invalid(f"{self.where}: {name} is missing; there is {_cut(there)}")
        return self.values[name]


def parse_fields(text: str, where: str) -> JsonFields:
    """Raises Invalid when ``text`` is no JSON object."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{where}: not JSON ({_cut(str(error))}); it must be an object") from error
    if not isinstance(values, dict):
        raise Invalid(f"{where}: {_shown(values)} is no JSON object; it must be one")
    return JsonFields(where, values)


def _shown(value: object) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
