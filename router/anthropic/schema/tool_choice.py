"""The field ``tool_choice``: whether the model must call a tool, and which one."""

from typing import Any, Literal, Self

from pydantic import model_validator

from router.openai.schema.strict_model import StrictModel, validation_error

CHAT_MODES = {"auto": "auto", "any": "required", "none": "none"}
"""The modes of ``tool_choice`` in a chat, by the types that Anthropic's API has for them."""


class ToolChoiceParam(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _name_agrees(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise validation_error(
                "the tool choice must have a name if and only if its type is `tool`"
            )
        return self

    @property
    def chat_choice(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return CHAT_MODES[self.type]
