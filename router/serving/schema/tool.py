"""The tools that a model may call, and whether it must call one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationInfo

from router.errors import invalid_field
from router.http.nesting import is_nested_deeper
from router.http.unknown_fields import UnsupportedField
from router.serving.schema.strict_model import drop_unknown_keys, validation_error

MAX_TOOLS = 128
"""The maximum number of tools, and of tools that a choice of tools names, as in OpenAI's API."""

MAX_TOOL_NESTING = 32
"""The deepest nesting of a tool's parameters and of a call's arguments, in objects and lists.
Templates that indent JSON repeat the indentation of each level for each value. Schemas in use have
up to 15 levels."""

TOOL_KEYS = frozenset({"type", "function"})
FUNCTION_KEYS = frozenset({"name", "description", "parameters", "strict"})
MISPLACED_TOOL_FIELDS = {
    key: UnsupportedField("it belongs in the tool's function") for key in FUNCTION_KEYS
}
MODES = ("none", "auto", "required")

FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")

Tool = dict[str, Any]
"""A tool exactly as the client sent it, since templates render its keys in the client's order."""


def _check_tool(tool: Tool, info: ValidationInfo) -> Tool:
    if tool.get("type") == "custom":
        raise validation_error("custom tools are not supported, only tools of type `function`")
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise validation_error("a tool must have type `function` and a `function` object")
    _check_name(function)
    for key, kind, noun in (
        ("description", str, "a string"),
        ("parameters", dict, "an object"),
        ("strict", bool, "true or false"),
    ):
        if not isinstance(function.get(key), kind | None):
            raise validation_error(f"a tool's {key} must be {noun}")
    if is_nested_deeper(function.get("parameters"), MAX_TOOL_NESTING):
        raise validation_error(
            f"a tool's parameters may be nested at most {MAX_TOOL_NESTING} levels deep"
        )
    return _known_part(tool, function, info)


def _known_part(tool: Tool, function: dict[str, Any], info: ValidationInfo) -> Tool:
    """Return the tool without unknown fields, which templates would render."""
    known_part = drop_unknown_keys(tool, TOOL_KEYS, "tools", info, MISPLACED_TOOL_FIELDS)
    known_function = drop_unknown_keys(function, FUNCTION_KEYS, "tools.function", info)
    if known_function is function:
        return known_part
    return {**known_part, "function": known_function}


def _check_tools(tools: list[Tool]) -> list[Tool]:
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise validation_error("two tools have the same name")
    return tools


Tools = Annotated[
    list[Annotated[Tool, AfterValidator(_check_tool)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    AfterValidator(_check_tools),
]


TOOLS = TypeAdapter(Tools)


def _check_choice(choice: Any) -> Any:
    """Check a tool choice: a mode, one function, or a mode with some functions."""
    if choice is None or choice in MODES:
        return choice
    if not isinstance(choice, dict):
        raise validation_error(f"the value must be one of {', '.join(MODES)}, or name a function")
    if choice.get("type") == "function":
        _function_name(choice)
        return choice
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, dict) or allowed.get("mode") not in MODES[1:]:
            raise validation_error(
                "allowed_tools must have a mode (`auto` or `required`) and tools"
            )
        if not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
            raise validation_error("the tools of allowed_tools must be a list that is not empty")
        if len(allowed["tools"]) > MAX_TOOLS:
            raise validation_error(f"allowed_tools may have at most {MAX_TOOLS} tools")
        for tool in allowed["tools"]:
            _function_name(tool)
        return choice
    raise validation_error(
        "the value must name a function or have type `allowed_tools`; other types are not supported"
    )


ToolChoice = Annotated[Any, AfterValidator(_check_choice)]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a chat uses tools. ``given`` are all tools of the request; ``offered`` are those that the
    prompt describes and that the model may call. ``max_calls`` limits the calls of an answer."""

    given: Sequence[Tool] = ()
    offered: Sequence[Tool] = ()
    is_forced: bool = False
    max_calls: int | None = None

    @classmethod
    def resolve(
        cls, choice: Any, tools: Sequence[Tool], parallel_calls: bool | None = None
    ) -> "ToolUse":
        """Apply a valid ``tool_choice`` to valid tools. Raises ApiError (400) for a tool that is
        not among them, or if a call is required and there are none."""
        mode, offered = _resolve_tool_choice(choice, tools)
        if mode == "required" and not offered:
            message = f"tool_choice {mode!r} is only allowed with tools"
            raise invalid_field("tool_choice", message)
        is_named = isinstance(choice, dict) and choice["type"] == "function"
        return cls(
            tools,
            () if mode == "none" else offered,
            mode == "required",
            1 if is_named or parallel_calls is False else None,
        )

    @property
    def has_strict(self) -> bool:
        return any(tool["function"].get("strict") for tool in self.offered)


def _resolve_tool_choice(choice: Any, tools: Sequence[Tool]) -> tuple[str, list[Tool]]:
    """Return the mode, and the tools that may be called."""
    if not isinstance(choice, dict):
        return choice or "auto", list(tools)
    if choice["type"] == "function":
        mode, names = "required", [_function_name(choice)]
    else:
        allowed = choice["allowed_tools"]
        mode, names = allowed["mode"], [_function_name(tool) for tool in allowed["tools"]]
    offered = {tool["function"]["name"]: tool for tool in tools}
    missing = [name for name in names if name not in offered]
    if missing:
        message = f"tool_choice names {missing[0]!r}, which is not one of the tools"
        raise invalid_field("tool_choice", message)
    return mode, [offered[name] for name in dict.fromkeys(names)]


def _function_name(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict) or choice.get("type") != "function":
        raise validation_error(
            'to choose the function f, pass {"type": "function", "function": {"name": "f"}}'
        )
    return _check_name(function)


def _check_name(function: dict[str, Any]) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise validation_error(
            "a function's name must consist of 1 to 128 letters, digits, `_`, `-` or `.`"
        )
    return name
