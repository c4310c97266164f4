"""The field ``output_config``: how much the model reasons, and the form of its answer."""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from router.openai.schema.strict_model import StrictModel

SCHEMA_NAME = "answer"
"""The name of the schema in a chat's ``response_format``, which requires one."""


class JsonOutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]

    @property
    def response_format(self) -> dict[str, Any]:
        schema = {"name": SCHEMA_NAME, "schema": self.schema_}
        return {"type": "json_schema", "json_schema": schema}


class OutputConfig(StrictModel):
    """How much the model reasons, and the form of its answer. ``task_budget`` is a hint without
    effect."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None
    task_budget: Annotated[Any, WithJsonSchema({"description": "Ignored."})] = None
