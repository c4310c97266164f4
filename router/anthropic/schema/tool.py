"""The tools that a model may call, and whether it must call one."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from router.anthropic.schema.content_block import CacheControl
from router.http.unknown_fields import UnsupportedField
from router.serving.schema.strict_model import StrictModel, validation_error
from router.serving.schema.tool import MAX_TOOLS
from router.serving.schema.tool import Tool as ChatTool

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


_CLIENT_TOOL = re.compile(r"(bash|text_editor|computer|browser|memory)(_toolset)?_\d+")
_SERVER_TOOL = re.compile(
    r"(web_search|web_fetch|code_execution|tool_search_tool_\w+|advisor)_\d+|tool_search_tool_\w+"
    r"|mcp_toolset"
)


class CustomTool(StrictModel):
    """A tool that the client runs, with a JSON schema of its input. ``defer_loading``,
    ``eager_input_streaming`` and ``input_examples`` are hints without effect."""

    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = MappingProxyType(
        {
            "function": UnsupportedField("name and input_schema belong directly in the tool"),
            "parameters": UnsupportedField("use input_schema"),
        }
    )

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None

    @property
    def is_offered(self) -> bool:
        """Whether the model may call the tool itself, not only through code execution."""
        return self.allowed_callers is None or "direct" in self.allowed_callers

    @property
    def chat_tool(self) -> ChatTool:
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.input_schema
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class ServerTool(StrictModel):
    """A tool that Anthropic's servers run. The model need not use it, so it is left out of the
    prompt."""

    model_config = ConfigDict(extra="ignore")

    type: str
    name: str | None = None


def _parse_tool(value: Any, parse_custom: ValidatorFunctionWrapHandler) -> CustomTool | ServerTool:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind == "custom":
        return cast(CustomTool, parse_custom(value))
    if _SERVER_TOOL.fullmatch(kind):
        name = value.get("name")
        return ServerTool(type=kind, name=name if isinstance(name, str) else None)
    if _CLIENT_TOOL.fullmatch(kind):
        raise validation_error(
            f"tools of type {kind!r} are not supported: only Anthropic's models know their schema; "
            "define the tool with a name and an input_schema"
        )
    raise validation_error(f"tools of type {kind!r} are not supported, only custom tools")


ToolParam = Annotated[
    CustomTool, WrapValidator(_parse_tool, json_schema_input_type=CustomTool | ServerTool)
]
"""A :class:`CustomTool` or a :class:`ServerTool`."""

ToolParams = Annotated[
    list[ToolParam],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]
