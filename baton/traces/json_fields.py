"""Checked access to the fields of a JSON object from a file. Errors say where in the file the field
is."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from baton.errors import Invalid

MAX_SHOWN_CHARS = 60
"""Maximum length of a wrong value in an error message."""


@dataclass(frozen=True, slots=True)
class JsonFields:
    """A JSON object. ``where`` is the object's location, with which every error message begins:
    ``file:line``, or a file and the object's path in it.

    All accessors raise Invalid for a field that is missing or wrong."""

    where: str
    values: Mapping[str, object]

    def integer(self, name: str, minimum: int, maximum: int) -> int:
        """Return the field ``name``: a whole number from ``minimum`` to ``maximum``."""
        value = self._value(name)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.invalid_field(name, f"a whole number from {minimum:,} to {maximum:,}")
        return value

    def number(self, name: str) -> float:
        """Return the field ``name``: a finite number, whole or not."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid_field(name, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.invalid_field(name, "a finite number")
        return number

    def positive(self, name: str) -> float:
        """Return the field ``name``: a finite number above 0."""
        number = self.number(name)
        if number <= 0:
            raise self.invalid_field(name, "above 0")
        return number

    def text(self, name: str, default: str | None = None) -> str:
        """Return the field ``name``: a string. If the field is missing and ``default`` is given,
        return ``default``."""
        if default is not None and name not in self.values:
            return default
        value = self._value(name)
        if not isinstance(value, str):
            raise self.invalid_field(name, "a string")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Return the field ``name``: a list of whole numbers."""
        values = self._value(name)
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise self.invalid_field(name, "a list of whole numbers")
        return tuple(values)

    def has(self, name: str) -> bool:
        return name in self.values

    def objects(self, name: str) -> list["JsonFields"]:
        """Return the field ``name``: a list of objects."""
        values = self._value(name)
        if not isinstance(values, list) or any(not isinstance(row, dict) for row in values):
            raise self.invalid_field(name, "a list of objects")
        return [JsonFields(f"{self.where}: {name}[{i}]", row) for i, row in enumerate(values)]

    def invalid_field(self, name: str, expected: str) -> Invalid:
        """Return an error that shows the value of the field ``name`` and says what would be valid
        (``expected``)."""
        return Invalid(
            f"{self.where}: {name} is {_shown(self.values[name])}; it must be {expected}"
        )

    def _value(self, name: str) -> object:
        if name not in self.values:
            found = (
                f"only the fields {_cut(', '.join(self.values))}" if self.values else "no fields"
            )
            raise Invalid(f"{self.where}: {name} is missing; the object has {found}")
        return self.values[name]


def parse_fields(text: str, where: str) -> JsonFields:
    """Parse a JSON object. Raises Invalid when ``text`` is not one."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Invalid(
            f"{where}: not JSON ({_cut(str(error))}); it must be a JSON object"
        ) from error
    if not isinstance(values, dict):
        raise Invalid(f"{where}: {_shown(values)} is not a JSON object; it must be one")
    return JsonFields(where, values)


def _shown(value: object) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
