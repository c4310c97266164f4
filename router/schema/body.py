"""What all bodies share: strictness, and words for what is wrong."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def wrong(message: str) -> PydanticCustomError:
    """A complaint about the field that is being validated."""
    return PydanticCustomError("wrong", "{message}", {"message": message})


def wrong_field(field: str, message: str) -> PydanticCustomError:
    """A complaint about ``field``, by whoever validates the whole body."""
    return PydanticCustomError(f"field:{field}", "{message}", {"message": message})


def only(*supported: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value not in supported or isinstance(value, bool):
            raise wrong(f"{value!r} is not supported yet, only {supported[-1]!r}")
        return value

    return check
