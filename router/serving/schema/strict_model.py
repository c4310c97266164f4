"""The strict base class of all request bodies, and validation errors."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationInfo
from pydantic_core import PydanticCustomError

from router.http.ignored_fields import IgnoredFields
from router.http.unknown_fields import UnsupportedField, find_refusal
from router.limits import MAX_IGNORED_FIELDS

MAX_TOKEN_ID_DIGITS = 9


class StrictModel(BaseModel):
    """The base class of request bodies and of the objects in them. An unknown field is an error. If
    the only errors are unknown fields that can't change the answer,
    :func:`router.http.body_parser.parse_body` validates the body again with ``extra="ignore"``.
    Don't set ``extra="allow"`` in a subclass: the second validation would drop the fields that the
    subclass allows."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = MappingProxyType({})
    """Unknown fields that would change the answer, and are therefore refused."""

    harmless_fields: ClassVar[frozenset[str]] = frozenset({"mode", "models", "users"})
    """Unknown fields that look like typos of known fields, but are not. For example, ``models`` is
    a list of fallbacks for routers in front of several providers."""


class RequestBody(StrictModel):
    """The base class of the bodies of requests that name a model."""

    model: str | None = None


def to_integer(value: Any) -> Any:
    """Return a float without a fraction as an integer, and anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


INTEGRAL = BeforeValidator(to_integer)
"""Lets an integer field accept a float without a fraction, such as 3.0: in some languages every
number of JSON is a float. It must be the last annotation, so that bounds are checked after it."""


def _to_token_id(value: Any) -> Any:
    is_number = isinstance(value, str) and value.isascii() and value.isdecimal()
    return int(value) if is_number and len(value) <= MAX_TOKEN_ID_DIGITS else value


TOKEN_ID = BeforeValidator(_to_token_id)
"""Lets a token id be written as a string, as the keys of ``logit_bias`` are, and as load tools pass
on what was typed on their command lines."""


def note_ignored(info: ValidationInfo, name: str) -> None:
    """Tell the client that the field ``name`` has no effect."""
    if isinstance(info.context, IgnoredFields):
        info.context.add(name)


def drop_unknown_keys(
    value: dict[str, Any],
    known: frozenset[str],
    path: str,
    info: ValidationInfo,
    unsupported: Mapping[str, UnsupportedField] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return ``value``, an object inside of a body that no pydantic model describes, without its
    unknown keys. ``path`` is the object's path in the body, such as ``tools.function``. Raises a
    validation error for an unknown key that would change the answer, or for any unknown key if the
    request is parsed strictly."""
    if known.issuperset(value):
        return value
    ignored = info.context if isinstance(info.context, IgnoredFields) else None
    for key in [each for each in value if each not in known]:
        if ignored is None or ignored.is_strict:
            may_have = ", ".join(sorted(known))
            raise validation_error(
                f"{path} has the unknown field {key!r}; allowed fields: {may_have}"
            )
        refusal = find_refusal(f"{path}.{key}", value[key], known, unsupported)
        if refusal is not None:
            raise validation_error(refusal.message)
        if not ignored.add(f"{path}.{key}"):
            raise validation_error(
                f"there are more than {MAX_IGNORED_FIELDS} different unknown fields"
            )
    return {key: each for key, each in value.items() if key in known}


def validation_error(message: str) -> PydanticCustomError:
    """Return an error for the field that is being validated."""
    return PydanticCustomError("wrong", "{message}", {"message": message})


def field_validation_error(field: str, message: str) -> PydanticCustomError:
    """Return an error for ``field``, to raise while the whole request body is validated."""
    return PydanticCustomError(f"field:{field}", "{message}", {"message": message})


def only_values(*supported: Any, why: str = "") -> AfterValidator:
    """Return a validator that accepts only the values in ``supported`` and null."""

    def check(value: Any) -> Any:
        if value is not None and (
            value not in supported or _equals_only_other_types(value, supported)
        ):
            named = " or ".join(map(repr, supported))
            raise validation_error(
                f"{value!r} is not supported, only {named}" + (f": {why}" if why else "")
            )
        return value

    return AfterValidator(check)


def ignored_unless(*effective: Any) -> AfterValidator:
    """Return a validator of a hint that can't change the answer. Any value is accepted. If the
    value is not null and not in ``effective``, the client is told that it has no effect."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value is not None and value not in effective:
            note_ignored(info, str(info.field_name))
        return value

    return AfterValidator(check)


def unsupported_field(why: str) -> AfterValidator:
    """Return a validator that accepts only null."""

    def check(value: Any) -> Any:
        if value is not None:
            raise validation_error(f"the field is not supported: {why}")
        return None

    return AfterValidator(check)


def _equals_only_other_types(value: Any, supported: tuple[Any, ...]) -> bool:
    """Whether every supported value that equals ``value`` has another type. (In Python, 1 equals
    True.)"""
    return not any(type(value) is type(each) for each in supported if value == each)
