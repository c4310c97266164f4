"""Parses a request body by its schema; an invalid body becomes an error that names the field."""

from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from router.errors import ApiError
from router.http.ignored_fields import MAX_NAMES, IgnoredFields
from router.http.json_limits import MAX_VALUES, check_json_size
from router.http.large_integers import round_large_integers
from router.http.unknown_fields import refuse_unknown_field

Body = TypeVar("Body", bound=BaseModel)

FIELD_PREFIX = "field:"
"""A validator of a whole body reports an invalid field by an error whose type is this prefix,
followed by the field's name."""


MAX_ERRORS = 1000
"""If a body has more errors than this, none is described. Describing 100,000 would block the event
loop for a quarter of a second."""


def parse_body(
    schema: type[Body],
    data: bytes,
    max_values: int = MAX_VALUES,
    ignored: IgnoredFields | None = None,
    *,
    rounds_integers: bool = False,
) -> Body:
    """Parse a JSON body. Raises ApiError (400) for its first error, or if it has too many values.
    If ``rounds_integers`` is set, integers of more than 64 bits become floats.

    Unknown fields are ignored and added to ``ignored``, except for those that would change the
    answer (:mod:`router.http.unknown_fields`). If ``ignored`` is None or its ``is_strict`` is True,
    every unknown field is an error. The first validation forbids unknown fields; only a body that
    has some is validated a second time, without them."""
    data = data.removeprefix(BOM_UTF8)
    check_json_size(data, max_values)
    if rounds_integers:
        data = round_large_integers(data)
    try:
        return schema.model_validate_json(data, context=ignored)
    except ValidationError as error:
        if ignored is None or ignored.is_strict:
            raise _first_error(error) from error
        _add_unknown_fields(schema, error, ignored)
    try:
        return schema.model_validate_json(data, context=ignored, extra="ignore")
    except ValidationError as error:
        raise _first_error(error) from error


def validate_fields(schema: type[Body], fields: Mapping[str, Any]) -> Body:
    """Validate the fields of a body that was made from another body. Raises ApiError (400) for the
    first error."""
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise _first_error(error) from error


def _add_unknown_fields(
    schema: type[BaseModel], error: ValidationError, ignored: IgnoredFields
) -> None:
    """Add the unknown fields to ``ignored`` if all of them can be ignored and there is no other
    error. Raises ApiError for the first error otherwise."""
    _check_number_of_errors(error)
    for each in error.errors(include_url=False):
        location = each["loc"]
        if each["type"] != "extra_forbidden":
            raise _to_api_error(each) from error
        path = _field_path(location)
        refusal = refuse_unknown_field(schema, location, path, each["input"])
        if refusal is not None:
            raise _field_error(path, refusal.message, refusal.code) from error
        if not ignored.add(".".join(step for step in location if isinstance(step, str))):
            message = f"the body has more than {MAX_NAMES} different unknown fields"
            raise ApiError(400, message, code="unknown_parameter") from error


def _check_number_of_errors(error: ValidationError) -> None:
    count = error.error_count()
    if count > MAX_ERRORS:
        message = f"the body has {count} unknown or invalid fields, which are too many to list"
        raise ApiError(400, message, code="invalid_value") from error


def _first_error(error: ValidationError) -> ApiError:
    _check_number_of_errors(error)
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
    """Format a location as OpenAI does: ``messages[0].content``."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path
