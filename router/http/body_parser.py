"""Parses a request body by its schema; an invalid body becomes an error that names the field."""

from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from router.errors import ApiError, invalid_field, not_json
from router.http.ignored_fields import IgnoredFields
from router.http.json_limits import check_json_size
from router.http.large_integers import round_large_integers
from router.http.unknown_fields import refuse_unknown_field
from router.limits import MAX_ERRORS, MAX_IGNORED_FIELDS, MAX_VALUES

Body = TypeVar("Body", bound=BaseModel)
Value = TypeVar("Value")

FIELD_PREFIX = "field:"
"""A validator of a whole body reports an invalid field by an error whose type is this prefix,
followed by the field's name."""


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


def validate_value(
    adapter: TypeAdapter[Value], value: Any, field: str, paths: Sequence[str] = ()
) -> Value:
    """Validate a value that was made from a body. Raises ApiError (400) for the first error, which
    names the ``field``; or, in a list whose items come from ``paths`` in the body, the path of the
    invalid item."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        _check_number_of_errors(error)
        first = error.errors(include_url=False, include_input=False)[0]
        location = (field, *first["loc"])
        if paths and len(location) > 1:
            location = (paths[int(first["loc"][0])],)
        raise _to_api_error({**first, "loc": location}) from error


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
            raise invalid_field(path, refusal.message, refusal.code) from error
        if not ignored.add(".".join(step for step in location if isinstance(step, str))):
            message = f"the body has more than {MAX_IGNORED_FIELDS} different unknown fields"
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
        return invalid_field(kind.removeprefix(FIELD_PREFIX), message)
    param = _field_path(error["loc"])
    if kind == "json_invalid":
        text = not_json("the body", error["ctx"]["error"])
        return ApiError(400, text, code="invalid_json")
    if kind == "model_type" and not param:
        return ApiError(400, "the body must be a JSON object", code="invalid_json")
    if kind == "extra_forbidden":
        return invalid_field(
            param, f"Unrecognized request argument supplied: {param}", "unknown_parameter"
        )
    if kind == "missing":
        message = f"Missing required parameter: {param}"
        return invalid_field(param, message, "missing_required_parameter")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return invalid_field(param, f"{param}: {message}", code)


def _field_path(location: tuple[str | int, ...]) -> str:
    """Format a location as OpenAI does: ``messages[0].content``."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path
