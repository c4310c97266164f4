"""Reads JSON files whose values come from elsewhere, with errors that name the file and the key."""

import json
import math
from copy import copy
from pathlib import Path
from typing import Any

from baton.errors import Invalid

MAX_JSON_BYTES = 64 * 1024 * 1024


class JsonFile:
    """A JSON object in a file. Its errors name the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.stat().st_size > MAX_JSON_BYTES:
                raise Invalid(f"{path}: the file is larger than {MAX_JSON_BYTES} bytes")
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise Invalid(f"{path}: the file is missing") from error
        except (OSError, ValueError) as error:
            raise Invalid(f"{path}: {error}") from error
        if not isinstance(value, dict):
            raise Invalid(f"{path}: the file is not a JSON object")
        self._values = value

    def part(self, key: str) -> "JsonFile":
        """Return the object under ``key``. If there is none, return this object itself: a model
        that is only a language model has its values at the top level, not in such an object."""
        values = self._values.get(key)
        if not isinstance(values, dict):
            return self
        part = copy(self)
        part._values = values
        return part

    def merged(self, *keys: str) -> "JsonFile":
        """Merge the objects under ``keys`` into one. If several have a field, the last one's value
        is used. A missing key counts as an empty object."""
        values: dict[str, Any] = {}
        for key in keys:
            part = self.get(key, {})
            if not isinstance(part, dict):
                raise Invalid(f"{self.path}: {key} is {part!r}; it must be an object")
            values |= part
        merged = copy(self)
        merged._values = values
        return merged

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def positive_int(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Invalid(f"{self.path}: {key} is {value!r}; it must be a positive integer")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
            or value <= 0
        ):
            raise Invalid(f"{self.path}: {key} is {value!r}; it must be a positive number")
        return float(value)

    def has(self, key: str) -> bool:
        """Whether the object has ``key``, even if its value is null."""
        return key in self._values

    def with_defaults(self, defaults: dict[str, Any]) -> "JsonFile":
        """Return this object with ``defaults`` for the keys that it does not have. A key whose
        value is null keeps it."""
        full = copy(self)
        full._values = defaults | self._values
        return full
