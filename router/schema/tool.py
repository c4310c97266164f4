"""A function that a model may ask to be called."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from router.schema.body import wrong

MAX_TOOLS = 128


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise wrong("a tool has type `function` and a `function` object")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise wrong("a tool's function has a name")
    return tool


Tools = Annotated[
    list[Annotated[dict[str, Any], AfterValidator(_check_tool)]], Field(max_length=MAX_TOOLS)
]
