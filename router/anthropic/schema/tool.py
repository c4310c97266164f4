"""The tools that a model may call."""

import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, WrapValidator

from router.anthropic.schema.cache_control import CacheControl
from router.http.unknown_fields import UnsupportedField
from router.openai.schema.strict_model import StrictModel, drop_unknown_keys, validation_error
from router.openai.schema.tool import MAX_TOOLS
from router.openai.schema.tool import Tool as ChatTool

_CLIENT_TOOL = re.compile(r"(bash|text_editor|computer|browser|memory)(_toolset)?_\d+")
_SERVER_TOOL = re.compile(
    r"(web_search|web_fetch|code_execution|tool_search_tool_\w+|advisor)_\d+|tool_search_tool_\w+"
    r"|mcp_toolset"
)


class CustomTool(StrictModel):
    """A tool of the client, with a JSON schema. ``defer_loading``, ``eager_input_streaming`` and
    ``input_examples`` are hints without effect."""

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


CUSTOM_TOOL_FIELDS = frozenset(CustomTool.model_fields)

CHAT_TOOL_FIELDS = {
    "function": UnsupportedField("a tool has its name and input_schema itself"),
    "parameters": UnsupportedField("use input_schema"),
}
"""Fields of OpenAI's tools."""


class ServerTool(StrictModel):
    """A tool that Anthropic's servers run. It is an offer that the model need not take up, so it is
    left out of the prompt."""

    model_config = ConfigDict(extra="ignore")

    type: str
    name: str | None = None


def _parse_tool(value: Any, _: Any, info: ValidationInfo) -> CustomTool | ServerTool:
    if not isinstance(value, dict):
        raise validation_error("a tool must be an object")
    kind = value.get("type")
    if not isinstance(kind, str) or kind == "custom":
        known = drop_unknown_keys(value, CUSTOM_TOOL_FIELDS, "tools", info, CHAT_TOOL_FIELDS)
        return CustomTool.model_validate(known)
    if _SERVER_TOOL.fullmatch(kind):
        name = value.get("name")
        return ServerTool(type=kind, name=name if isinstance(name, str) else None)
    if _CLIENT_TOOL.fullmatch(kind):
        raise validation_error(
            f"tools of type {kind!r} are not supported: only Anthropic's models know their schema; "
            "define the tool with a name and an input_schema"
        )
    raise validation_error(f"tools of type {kind!r} are not supported, only custom tools")


ToolParams = Annotated[
    list[Annotated[CustomTool | ServerTool, WrapValidator(_parse_tool)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]
