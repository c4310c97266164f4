"""Builds the messages of a chat from the items of a conversation."""

from typing import Any

from router.errors import ApiError
from router.responses.encrypted_reasoning import decode_reasoning
from router.responses.object_reader import ObjectReader
from router.responses.tool_arguments import encode_custom_arguments
from router.responses.tools import CUSTOM_INPUT, function_name

INPUT_ROLES = ("user", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")

IGNORED_ITEMS = frozenset({"web_search_call", "mcp_list_tools"})
"""Traces of OpenAI's hosted tools that contain no text for the model."""


class ChatMessages:
    """The messages so far. ``paths`` are the places in the request from which they come, for
    errors. ``ignored`` are the items that no message could be made from.

    The Responses API has items where a chat has one message of the assistant with its reasoning,
    text and calls. So such a message stays open until an item of another kind follows."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.ignored: list[str] = []
        self._assistant: dict[str, Any] | None = None

    def add_text(self, role: str, text: str, path: str) -> None:
        self._append({"role": role, "content": text}, path)

    def add_item(self, item: Any, path: str) -> None:
        """Add an item of the input or of an earlier output. Raises ApiError (400)."""
        reader = ObjectReader(item, path)
        kind = reader.optional_text("type") or ("message" if "role" in reader.value else "")
        if kind == "message":
            self._add_message(reader)
        elif kind == "reasoning":
            self._add_reasoning(reader)
        elif kind in ("function_call", "custom_tool_call"):
            self._add_call(reader, kind)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._add_call_output(reader)
        elif kind in IGNORED_ITEMS:
            self.ignored.append(f"input.{kind}")
        else:
            raise reader.error("type", f"items of type {kind!r} are not supported")

    def _add_message(self, reader: ObjectReader) -> None:
        role = reader.text("role")
        text = _read_content(reader, "content")
        if role == "assistant":
            self._add_assistant_text(text, reader.path)
        elif role in INPUT_ROLES:
            self._append({"role": role, "content": text}, reader.path)
        else:
            raise reader.error("role", f"{role!r} must be user, system, developer or assistant")

    def _add_assistant_text(self, text: str, path: str) -> None:
        """Add a text of the assistant. It belongs to the open message, unless that has text and no
        calls: then it was a message by itself."""
        open_message = self._assistant
        if open_message is not None and open_message["content"] and not _has_calls(open_message):
            self._assistant = None
        self._open_assistant(path)["content"] += text

    def _add_reasoning(self, reader: ObjectReader) -> None:
        text = _read_reasoning(reader)
        if not text:
            if reader.value.get("encrypted_content") is not None:
                self.ignored.append("input.encrypted_content")
            return
        open_message = self._assistant
        if open_message is not None and (open_message["content"] or _has_calls(open_message)):
            self._assistant = None
        message = self._open_assistant(reader.path)
        before = message.get("reasoning_content")
        message["reasoning_content"] = f"{before}\n\n{text}" if before else text

    def _add_call(self, reader: ObjectReader, kind: str) -> None:
        name = function_name(reader.text("name"), reader.optional_text("namespace"))
        if kind == "custom_tool_call":
            arguments = encode_custom_arguments(reader.text(CUSTOM_INPUT))
        else:
            arguments = reader.text("arguments")
        call = {
            "id": reader.text("call_id"),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self._open_assistant(reader.path).setdefault("tool_calls", []).append(call)

    def _add_call_output(self, reader: ObjectReader) -> None:
        message = {
            "role": "tool",
            "tool_call_id": reader.text("call_id"),
            "content": _read_content(reader, "output"),
        }
        self._append(message, reader.path)

    def _open_assistant(self, path: str) -> dict[str, Any]:
        if self._assistant is None:
            message = {"role": "assistant", "content": ""}
            self._append(message, path)
            self._assistant = message
        return self._assistant

    def _append(self, message: dict[str, Any], path: str) -> None:
        self.messages.append(message)
        self.paths.append(path)
        self._assistant = None


def _has_calls(message: dict[str, Any]) -> bool:
    return "tool_calls" in message


def _read_content(reader: ObjectReader, name: str) -> str:
    """Return the text of a message or a tool: a string, or a list of text parts."""
    content = reader.value.get(name)
    if not isinstance(content, list):
        return reader.text(name)
    path = f"{reader.path}.{name}"
    return "".join(
        _read_part(ObjectReader(part, f"{path}[{number}]")) for number, part in enumerate(content)
    )


def _read_part(reader: ObjectReader) -> str:
    kind = reader.text("type")
    if kind in TEXT_PARTS:
        return reader.text("text")
    if kind == "refusal":
        return reader.text("refusal")
    raise reader.error("type", f"content of type {kind!r} is not supported, only text")


def _read_reasoning(reader: ObjectReader) -> str:
    """Return the reasoning of an item: its content, or if it has none, what the client keeps
    encrypted, or a summary."""
    content = _read_texts(reader, "content")
    if content:
        return content
    encrypted = reader.optional_text("encrypted_content")
    kept = decode_reasoning(encrypted) if encrypted is not None else None
    return kept or _read_texts(reader, "summary")


def _read_texts(reader: ObjectReader, name: str) -> str:
    parts = reader.optional_list(name)
    return "\n\n".join(
        ObjectReader(part, f"{reader.path}.{name}[{number}]").text("text")
        for number, part in enumerate(parts)
    )


def missing_input() -> ApiError:
    message = "Missing required parameter: input"
    return ApiError(400, message, param="input", code="missing_required_parameter")
