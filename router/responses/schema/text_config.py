"""The field ``text``: the form of the answer's text."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from router.openai.schema.response_format import SchemaName
from router.openai.schema.strict_model import StrictModel, field_validation_error

FORMAT_FIELD = "text.format"


class TextFormat(StrictModel):
    """The format of the answer's text: like the ``response_format`` of a chat request, but with the
    fields of ``json_schema`` at the top level, next to ``type``."""

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            message = f"{FORMAT_FIELD} of type json_schema must have a name and a schema"
            raise field_validation_error(FORMAT_FIELD, message)
        return self

    @property
    def chat_format(self) -> dict[str, Any] | None:
        """The same format as a chat's ``response_format``; None for plain text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": self.type}
        fields = self.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": self.type, "json_schema": fields}

    @property
    def answer_format(self) -> dict[str, Any]:
        """The same format as a response repeats it: a schema's format with all its fields."""
        fields = self.model_dump(by_alias=True, exclude_none=True)
        if self.type != "json_schema":
            return fields
        return {"description": None, "strict": False} | fields


class TextConfig(StrictModel):
    """The form of the answer's text. ``verbosity`` is a hint, which is not passed to the model."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
