"""The body of POST /v1/chat/completions."""

import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from baton.core.request import MAX_LOGPROBS
from router.openai.schema.chat_hints import ChatHints, TemplateText
from router.openai.schema.generation_body import GenerationBody
from router.openai.schema.message import Messages, check_continuation
from router.openai.schema.strict_model import INTEGRAL, field_validation_error, validation_error
from router.openai.schema.tool import Tool, ToolChoice, Tools, resolve_tool_choice

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


class ChatBody(GenerationBody, ChatHints):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1), INTEGRAL] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), INTEGRAL] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: TemplateText | None = None
    # Not in OpenAI's API
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise field_validation_error(
                "top_logprobs", "top_logprobs is only allowed with logprobs"
            )
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise field_validation_error(
                "max_completion_tokens",
                "max_tokens and max_completion_tokens differ; give only one of them",
            )
        return self

    @model_validator(mode="after")
    def _tools_agree(self) -> Self:
        try:
            mode, tools = resolve_tool_choice(self.tool_choice, self.tools or ())
        except ValueError as error:
            raise field_validation_error("tool_choice", str(error)) from error
        if mode == "required" and not tools:
            raise field_validation_error(
                "tool_choice", f"tool_choice {mode!r} is only allowed with tools"
            )
        if self.min_tokens and (mode == "required" or self.has_strict_tools):
            message = "min_tokens is not allowed with forced or strict tool calls"
            raise field_validation_error("min_tokens", message)
        rules = self.token_rules_field
        if rules is not None and (mode == "required" or self.has_strict_tools):
            message = f"{rules} is not allowed with forced or strict tool calls"
            raise field_validation_error(rules, message)
        if mode == "required" and self.format is not None and self.response_format is None:
            field = self.format[0]
            raise field_validation_error(field, f"{field} is not allowed with a forced tool call")
        return self

    @model_validator(mode="after")
    def _continues_an_answer(self) -> Self:
        if self.continue_final_message:
            check_continuation(self.messages, self.add_generation_prompt)
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def disables_reasoning(self) -> bool:
        """Whether the request switches reasoning off: by a template variable in
        :data:`THINKING_SWITCHES` or, if it sets none of these, by ``reasoning_effort: none``."""
        variables = self.chat_template_kwargs or {}
        values = [variables[name] for name in THINKING_SWITCHES if name in variables]
        return any(value is False for value in values) or (
            not values and self.reasoning_effort == "none"
        )

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the prompt describes and that the model may call."""
        mode, tools = resolve_tool_choice(self.tool_choice, self.tools or ())
        return [] if mode == "none" else tools

    @property
    def forces_tool_call(self) -> bool:
        return resolve_tool_choice(self.tool_choice, self.tools or ())[0] == "required"

    @property
    def has_strict_tools(self) -> bool:
        """Whether calls to strict tools restrict an answer that no response format restricts."""
        strict = any(tool["function"].get("strict") for tool in self.offered_tools)
        return strict and self.format is None

    @property
    def max_tool_calls(self) -> int | None:
        named = isinstance(self.tool_choice, dict) and self.tool_choice["type"] == "function"
        return 1 if named or self.parallel_tool_calls is False else None
