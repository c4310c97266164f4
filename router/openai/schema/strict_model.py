"""The strict base class of all request bodies, and validation errors."""

from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def validation_error(message: str) -> PydanticCustomError:
    """Return an error for the field that is being validated."""
    return PydanticCustomError("wrong", "{message}", {"message": message})


def field_validation_error(field: str, message: str) -> PydanticCustomError:
    """Return an error for ``field``, to raise while the whole request body is validated."""
    return PydanticCustomError(f"field:{field}", "{message}", {"message": message})


def only_values(*supported: Any, why: str = "") -> AfterValidator:
    """Return a validator that accepts these values and null."""

    def check(value: Any) -> Any:
        if value is not None and (
            value not in supported or _is_equal_of_other_type(value, supported)
        ):
            named = " or ".join(map(repr, supported))
            raise validation_error(
                f"{value!r} is not supported, only {named}" + (f": {why}" if why else "")
            )
        return value

    return AfterValidator(check)


def unsupported_field(why: str) -> AfterValidator:
    """Return a validator that accepts only null."""

    def check(value: Any) -> Any:
        if value is not None:
            raise validation_error(f"is not supported: {why}")
        return None

    return AfterValidator(check)


def _is_equal_of_other_type(value: Any, supported: tuple[Any, ...]) -> bool:
    """Whether the value equals supported values of another type only, as 1 equals True."""
    return not any(type(value) is type(each) for each in supported if value == each)
