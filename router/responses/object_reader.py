"""Reads the fields of a JSON object, with errors that name them by their paths in the request."""

from collections.abc import Mapping
from typing import Any, TypeVar

from router.errors import ApiError
from router.responses.schema.input_tokens_body import MAX_ID_CHARACTERS

Value = TypeVar("Value")


class ObjectReader:
    """Reads one object. ``path`` is the object's place in the request, such as ``input[3]``. All
    methods raise ApiError (400) for a value of a wrong type."""

    def __init__(self, value: Any, path: str) -> None:
        self.path = path
        if not isinstance(value, dict):
            raise ApiError(
                400, f"{path}: the value must be an object", param=path, code="invalid_type"
            )
        self.value: Mapping[str, Any] = value

    def text(self, name: str) -> str:
        """Return a required string."""
        if self.value.get(name) is None:
            path = f"{self.path}.{name}"
            message = f"Missing required parameter: {path}"
            raise ApiError(400, message, param=path, code="missing_required_parameter")
        return self._of_type(name, str)

    def optional_text(self, name: str) -> str | None:
        return None if self.value.get(name) is None else self._of_type(name, str)

    def identifier(self, name: str) -> str:
        """Return a required string of at most ``MAX_ID_CHARACTERS``."""
        value = self.text(name)
        if len(value) > MAX_ID_CHARACTERS:
            message = f"the value must have at most {MAX_ID_CHARACTERS} characters"
            raise self.error(name, message, "string_above_max_length")
        return value

    def optional_list(self, name: str) -> list[Any]:
        """Return a list; an empty one if the field is absent."""
        return [] if self.value.get(name) is None else self._of_type(name, list)

    def error(self, name: str, message: str, code: str = "invalid_value") -> ApiError:
        """Return an error about the field ``name``, or about the whole object if ``name`` is
        empty."""
        path = f"{self.path}.{name}" if name else self.path
        return ApiError(400, f"{path}: {message}", param=path, code=code)

    def _of_type(self, name: str, kind: type[Value]) -> Value:
        value = self.value[name]
        if not isinstance(value, kind):
            noun = "a string" if kind is str else "a list"
            raise self.error(name, f"the value must be {noun}", "invalid_type")
        return value
