"""Request fields that become variables of the chat template.

Other servers have fields of their own for what Baton takes in ``chat_template_kwargs`` and in
``reasoning_effort``. They are taken because many clients send them, and their meaning is exact."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from router.http.unknown_fields import UnsupportedField
from router.serving.schema.strict_model import StrictModel, field_validation_error, validation_error

TemplateText = Annotated[str, Field(max_length=1024)]
"""A text for a variable of chat templates."""

MAX_TEMPLATE_VARIABLES = 32
MAX_VARIABLE_CHARACTERS = 1024

THINKING_SWITCHES = ("enable_thinking", "thinking")

_IDENTIFIER = re.compile(r"[a-zA-Z_]\w{0,63}")


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    for name, value in variables.items():
        if not _IDENTIFIER.fullmatch(name):
            raise validation_error(f"{name!r} is not a valid variable name")
        if not isinstance(value, str | int | float | bool | None):
            raise validation_error(f"{name} must be a string, a number, true, false or null")
        if isinstance(value, str) and len(value) > MAX_VARIABLE_CHARACTERS:
            raise validation_error(f"{name} must have at most {MAX_VARIABLE_CHARACTERS} characters")
    return variables


Variables = Annotated[
    dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES), AfterValidator(_check_variables)
]


class ThinkingSwitch(StrictModel):
    """Whether the model reasons, in the form of DeepSeek, Z.ai and Anthropic. ``budget_tokens`` is
    a hint without effect, as in the Messages API."""

    type: Literal["enabled", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class ThinkingFields(StrictModel):
    """Whether the model reasons: ``enable_thinking`` as Qwen's API has it, ``think`` as Ollama's,
    ``thinking`` as DeepSeek's."""

    enable_thinking: bool | None = None
    think: bool | None = None
    thinking: ThinkingSwitch | None = None

    @model_validator(mode="after")
    def _switches_agree(self) -> Self:
        values = self._switches
        if len(set(values.values())) > 1:
            names = list(values)
            message = f"{names[0]} and {names[-1]} differ; give only one of them"
            raise field_validation_error(names[-1], message)
        return self

    @property
    def _switches(self) -> dict[str, bool]:
        """The given fields, and whether each switches reasoning on."""
        typed = None if self.thinking is None else self.thinking.type == "enabled"
        given = {"enable_thinking": self.enable_thinking, "think": self.think, "thinking": typed}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def thinking_switch(self) -> tuple[str, bool] | None:
        """The name of a given field, and whether it switches reasoning on; None if there is no
        such field."""
        return next(iter(self._switches.items()), None)


class ReasoningField(StrictModel):
    """How much the model reasons, in the form of the Responses API and OpenRouter."""

    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        "enabled": UnsupportedField("use effort, or enable_thinking"),
        "max_tokens": UnsupportedField("max_tokens limits the reasoning and the answer together"),
        "exclude": UnsupportedField("reasoning is always in the answer", (False,)),
    }

    effort: TemplateText | None = None
