"""The tools of a request, in the form in which a chat offers them.

The Responses API has kinds of tools that chats don't have. A custom tool, whose input is free text,
becomes a function with one string parameter. The tools of a namespace become functions whose names
begin with the namespace. Hosted tools, which OpenAI's servers run, are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

from router.errors import ApiError, invalid_field
from router.responses.schema import MAX_ID_CHARACTERS
from router.serving.schema.tool import FUNCTION_NAME, MAX_TOOLS, Tool

Value = TypeVar("Value")


class ObjectReader:
    """Reads one object. ``path`` is the object's place in the request, such as ``input[3]``. All
    methods raise ApiError (400) for a value of a wrong type."""

    def __init__(self, value: Any, path: str) -> None:
        self.path = path
        if not isinstance(value, dict):
            raise invalid_field(path, f"{path}: the value must be an object", "invalid_type")
        self.value: Mapping[str, Any] = value

    def text(self, name: str) -> str:
        """Return a required string."""
        if self.value.get(name) is None:
            path = f"{self.path}.{name}"
            message = f"Missing required parameter: {path}"
            raise invalid_field(path, message, "missing_required_parameter")
        return self._of_type(name, str)

    def optional_text(self, name: str) -> str | None:
        return None if self.value.get(name) is None else self._of_type(name, str)

    def identifier(self, name: str) -> str:
        """Return a required string of at most ``MAX_ID_CHARACTERS``."""
        value = self.text(name)
        if len(value) > MAX_ID_CHARACTERS:
            message = f"the value must have at most {MAX_ID_CHARACTERS} characters"
            raise self.error(name, message, "string_above_max_length")
        return value

    def optional_list(self, name: str) -> list[Any]:
        """Return a list; an empty one if the field is absent."""
        return [] if self.value.get(name) is None else self._of_type(name, list)

    def error(self, name: str, message: str, code: str = "invalid_value") -> ApiError:
        """Return an error about the field ``name``, or about the whole object if ``name`` is
        empty."""
        path = f"{self.path}.{name}" if name else self.path
        return invalid_field(path, f"{path}: {message}", code)

    def _of_type(self, name: str, kind: type[Value]) -> Value:
        value = self.value[name]
        if not isinstance(value, kind):
            noun = "a string" if kind is str else "a list"
            raise self.error(name, f"the value must be {noun}", "invalid_type")
        return value


HOSTED_TOOLS = frozenset(
    {
        "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview",
        "file_search", "image_generation", "local_shell", "mcp", "programmatic_tool_calling",
        "shell", "tool_search", "web_search", "web_search_2025_08_26", "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)  # fmt: skip
"""Types of tools that OpenAI's servers run, or that only OpenAI's models know."""

NAMESPACE_SEPARATOR = "__"

CUSTOM_INPUT = "input"
"""The parameter of the function that represents a custom tool."""

CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string", "description": "The tool's input, as text."}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


FUNCTION_DEFAULTS = {"description": None, "parameters": None, "strict": False}
"""The optional fields of a function tool; a response repeats the tool with all of them."""


@dataclass(frozen=True, slots=True)
class ToolIdentity:
    """How the client names a tool that it has offered."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def function_name(self) -> str:
        """The name of the function that the model sees."""
        return function_name(self.name, self.namespace)


def function_name(name: str, namespace: str | None) -> str:
    return f"{namespace}{NAMESPACE_SEPARATOR}{name}" if namespace else name


@dataclass(slots=True)
class OfferedTools:
    """The tools of one request. ``functions`` are the tools as the model sees them, ``paths`` are
    their places in the request, and ``identities`` has the client's names for them, by function
    name. ``kept`` are the tools as a response repeats them: functions with all their fields, other
    tools as the client sent them. Hosted tools are left out and only named in ``ignored``, as in
    ``tools.web_search``."""

    functions: list[Tool] = field(default_factory=list)
    identities: dict[str, ToolIdentity] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    kept: list[Tool] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def add_function(self, identity: ToolIdentity, reader: ObjectReader, **fields: Any) -> None:
        name = identity.function_name
        if not FUNCTION_NAME.fullmatch(name):
            raise reader.error(
                "name", f"{name!r} must consist of 1 to 128 letters, digits, `_`, `-` or `.`"
            )
        if name in self.identities:
            raise reader.error("name", f"another tool is named {name!r}, too")
        function = {"name": name, "description": reader.optional_text("description"), **fields}
        given = {key: value for key, value in function.items() if value is not None}
        self.functions.append({"type": "function", "function": given})
        self.paths.append(reader.path)
        self.identities[name] = identity


def read_tools(tools: Sequence[Tool]) -> OfferedTools:
    """Read the tools. Raises ApiError (400), which names the invalid field."""
    offered = OfferedTools()
    for number, tool in enumerate(tools):
        reader = ObjectReader(tool, f"tools[{number}]")
        kind = reader.text("type")
        if kind in HOSTED_TOOLS:
            offered.ignored.append(f"tools.{kind}")
            continue
        if kind == "namespace":
            _read_namespace(offered, reader)
        else:
            _read_tool(offered, reader, None)
        offered.kept.append(FUNCTION_DEFAULTS | tool if kind == "function" else tool)
    return offered


def _read_namespace(offered: OfferedTools, reader: ObjectReader) -> None:
    namespace = reader.text("name")
    for number, tool in enumerate(reader.optional_list("tools")):
        _read_tool(offered, ObjectReader(tool, f"{reader.path}.tools[{number}]"), namespace)


def _read_tool(offered: OfferedTools, reader: ObjectReader, namespace: str | None) -> None:
    kind = reader.text("type")
    if kind == "function":
        _read_function(offered, reader, namespace)
    elif kind == "custom":
        _read_custom_tool(offered, reader, namespace)
    else:
        raise reader.error("type", f"{kind!r} is not supported; offer a tool of type `function`")


def _read_function(offered: OfferedTools, reader: ObjectReader, namespace: str | None) -> None:
    value = reader.value
    if isinstance(value.get("function"), dict):
        message = (
            "a function's name and parameters belong beside `type`, not in a `function` object"
        )
        raise reader.error("function", message)
    for name, kind, noun in (
        ("parameters", dict, "an object"),
        ("strict", bool, "true or false"),
    ):
        if not isinstance(value.get(name), kind | None):
            raise reader.error(name, f"the value must be {noun}", "invalid_type")
    identity = ToolIdentity(reader.text("name"), namespace)
    offered.add_function(
        identity, reader, parameters=value.get("parameters"), strict=value.get("strict")
    )


def _read_custom_tool(offered: OfferedTools, reader: ObjectReader, namespace: str | None) -> None:
    form = reader.value.get("format")
    if form is not None and ObjectReader(form, f"{reader.path}.format").text("type") != "text":
        raise reader.error("format", "only the type `text` is supported, because grammars of tool "
                           "inputs are not enforced")  # fmt: skip
    identity = ToolIdentity(reader.text("name"), namespace, is_custom=True)
    offered.add_function(identity, reader, parameters=CUSTOM_PARAMETERS)


def to_chat_tool_choice(choice: str | dict[str, Any] | None, offered: OfferedTools) -> Any:
    """Convert the Responses API's ``tool_choice`` to a chat's ``tool_choice``. Raises ApiError
    (400) for a tool that is not offered to the model."""
    if choice in (None, "none", "auto"):
        return choice
    if choice == "required":
        if not offered.functions:
            raise _choice_error("a call is required, and there is no tool that the model can call")
        return choice
    if isinstance(choice, str):
        raise _choice_error(f"{choice!r} must be none, auto or required")
    assert choice is not None
    if choice.get("type") == "allowed_tools":
        return _allowed_tools(choice, offered)
    return _named_function(choice, offered, "tool_choice")


def _allowed_tools(choice: dict[str, Any], offered: OfferedTools) -> dict[str, Any]:
    reader = ObjectReader(choice, "tool_choice")
    mode, tools = reader.text("mode"), reader.optional_list("tools")
    if mode not in ("auto", "required"):
        raise reader.error("mode", f"{mode!r} must be auto or required")
    if len(tools) > MAX_TOOLS:
        raise reader.error("tools", f"the list may have at most {MAX_TOOLS} tools")
    named = [
        _named_function(tool, offered, f"tool_choice.tools[{number}]")
        for number, tool in enumerate(tools)
        if not (isinstance(tool, dict) and tool.get("type") in HOSTED_TOOLS)
    ]
    if not named:
        raise reader.error("tools", "the model can call none of these tools")
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def _named_function(choice: Any, offered: OfferedTools, path: str) -> dict[str, Any]:
    reader = ObjectReader(choice, path)
    kind = reader.text("type")
    if kind not in ("function", "custom"):
        message = f"{path}: there is no hosted tool {kind!r}; only the client's tools can be called"
        raise invalid_field(path, message)
    name = function_name(reader.text("name"), reader.optional_text("namespace"))
    if name not in offered.identities:
        raise reader.error("name", f"the field `tools` has no tool named {name!r}")
    return {"type": "function", "function": {"name": name}}


def _choice_error(message: str) -> ApiError:
    return invalid_field("tool_choice", f"tool_choice: {message}")


def encode_custom_arguments(text: str) -> str:
    """Return the arguments of a function call that passes ``text`` to a custom tool."""
    return orjson.dumps({CUSTOM_INPUT: text}).decode()


def decode_custom_arguments(arguments: str) -> str:
    """Return a custom tool's input. Arguments that are not the expected JSON object, for example
    because the answer ended within them, are returned as they are."""
    try:
        value = orjson.loads(arguments)
    except ValueError:
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
