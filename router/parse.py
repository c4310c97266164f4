"""A body's bytes to its schema; what is wrong with them becomes a problem that names it."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from router.json_bounds import MAX_VALUES, check_values
from router.problem import Problem

Body = TypeVar("Body", bound=BaseModel)

FIELD_PREFIX = "field:"
"""Begins the type of an error that a whole body is wrong by, followed by the field to name."""


MAX_ERRORS = 1000
"""Of one body. To describe 100,000 takes a quarter of a second, in which nothing else runs."""


def parse(schema: type[Body], data: bytes, max_values: int = MAX_VALUES) -> Body:
    """Raises Problem (400) for the first error, or for a body of too many values."""
    check_values(data, max_values)
    try:
        return schema.model_validate_json(data)
    except ValidationError as error:
        raise _first_of(error) from error


def _first_of(error: ValidationError) -> Problem:
    count = error.error_count()
    if count > MAX_ERRORS:
        message = f"the body has {count} fields that are unknown or wrong, too many to name one"
        return Problem(400, message, code="invalid_value")
    return _problem(error.errors(include_url=False, include_input=False)[0])


def _problem(error: Mapping[str, Any]) -> Problem:
    kind, message = error["type"], error["msg"]
    if kind.startswith(FIELD_PREFIX):
        return _at(kind.removeprefix(FIELD_PREFIX), message, "invalid_value")
    param = _param(error["loc"])
    if kind == "json_invalid":
        return Problem(400, f"the body is not JSON: {error['ctx']['error']}", code="invalid_json")
    if kind == "model_type" and not param:
        return Problem(400, "the body must be a JSON object", code="invalid_json")
    if kind == "extra_forbidden":
        return _at(param, f"Unrecognized request argument supplied: {param}", "unknown_parameter")
    if kind == "missing":
        message = f"Missing required parameter: {param}"
        return _at(param, message, "missing_required_parameter")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return _at(param, f"{param}: {message}", code)


def _at(param: str, message: str, code: str) -> Problem:
    return Problem(400, message, param=param or None, code=code)


def _param(location: tuple[str | int, ...]) -> str:
    """As OpenAI writes it: ``messages[0].content``."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path
