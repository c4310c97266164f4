"""A body's bytes to its schema; what is wrong with them becomes a problem that names it."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from router.errors import ApiError
from router.http.json_limits import MAX_VALUES, check_json_size

Body = TypeVar("Body", bound=BaseModel)

FIELD_PREFIX = "field:"
"""Begins the type of an error that a whole body is wrong by, followed by the field to name."""


MAX_ERRORS = 1000
"""Of one body. To describe 100,000 takes a quarter of a second, in which nothing else runs."""


def parse_body(schema: type[Body], data: bytes, max_values: int = MAX_VALUES) -> Body:
    """Raises Problem (400) for the first error, or for a body of too many values."""
    check_json_size(data, max_values)
    try:
        return schema.model_validate_json(data)
    except ValidationError as error:
        raise _first_error(error) from error


def _first_error(error: ValidationError) -> ApiError:
    count = error.error_count()
    if count > MAX_ERRORS:
        message = f"the body has {count} fields that are unknown or wrong, too many to name one"
        return ApiError(400, message, code="invalid_value")
    return _to_api_error(error.errors(include_url=False, include_input=False)[0])


def _to_api_error(error: Mapping[str, Any]) -> ApiError:
    kind, message = error["type"], error["msg"]
    if kind.startswith(FIELD_PREFIX):
        return _field_error(kind.removeprefix(FIELD_PREFIX), message, "invalid_value")
    param = _field_path(error["loc"])
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {error['ctx']['error']}", code="invalid_json")
    if kind == "model_type" and not param:
        return ApiError(400, "the body must be a JSON object", code="invalid_json")
    if kind == "extra_forbidden":
        return _field_error(
            param, f"Unrecognized request argument supplied: {param}", "unknown_parameter"
        )
    if kind == "missing":
        message = f"Missing required parameter: {param}"
        return _field_error(param, message, "missing_required_parameter")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return _field_error(param, f"{param}: {message}", code)


def _field_error(param: str, message: str, code: str) -> ApiError:
    return ApiError(400, message, param=param or None, code=code)


def _field_path(location: tuple[str | int, ...]) -> str:
    """As OpenAI writes it: ``messages[0].content``."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path
