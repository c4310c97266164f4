"""Builds the messages of a chat from the items of a conversation."""

from dataclasses import dataclass, field
from typing import Any

from router.errors import ApiError
from router.responses.encrypted_reasoning import decode_reasoning
from router.responses.object_reader import ObjectReader
from router.responses.tool_arguments import encode_custom_arguments
from router.responses.tools import CUSTOM_INPUT, function_name

INPUT_ROLES = ("user", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")

PARAGRAPH = "\n\n"
"""Separates pieces of reasoning."""

IGNORED_ITEMS = frozenset({"web_search_call", "mcp_list_tools"})
"""Items of OpenAI's hosted tools that contain no text for the model."""


@dataclass(slots=True)
class _AssistantDraft:
    """A message of the assistant while parts are added to it. The parts are joined only at the end,
    since there may be thousands."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    has_text: bool = False

    def add_text(self, text: str) -> None:
        self.texts.append(text)
        self.has_text = self.has_text or bool(text)

    @property
    def json(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.texts)}
        if self.reasoning:
            message["reasoning_content"] = PARAGRAPH.join(self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


class ChatMessages:
    """Collects the messages of a chat. ``paths`` has for each message the place in the request from
    which its text comes, for errors. ``ignored`` are the parts of the input from which no message
    could be made.

    The Responses API has separate items for the assistant's reasoning, text and calls, which are
    one message in a chat. So the assistant's message stays open until an item of another kind
    follows."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.ignored: list[str] = []
        self._messages: list[dict[str, Any] | _AssistantDraft] = []
        self._assistant: _AssistantDraft | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [each if isinstance(each, dict) else each.json for each in self._messages]

    def add_text(self, role: str, text: str, path: str) -> None:
        self._append({"role": role, "content": text}, path)

    def add_item(self, item: Any, path: str) -> None:
        """Add an item of the input or of an earlier output. Raises ApiError (400)."""
        reader = ObjectReader(item, path)
        if reader.value.get("id") is not None:  # items are later found by their ids
            reader.identifier("id")
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
            self._append({"role": role, "content": text}, _content_path(reader, "content"))
        else:
            raise reader.error("role", f"{role!r} must be user, system, developer or assistant")

    def _add_assistant_text(self, text: str, path: str) -> None:
        """Add the text of one of the assistant's message items to the open message. If that message
        ends with the text of an earlier item, open a new one: adjacent message items stay separate
        messages."""
        draft = self._assistant
        if draft is not None and draft.has_text and not draft.tool_calls:
            self._assistant = None
        self._open_assistant(path).add_text(text)

    def _add_reasoning(self, reader: ObjectReader) -> None:
        text = _read_reasoning(reader)
        if not text:
            if reader.value.get("encrypted_content") is not None:
                self.ignored.append("input.encrypted_content")
            return
        draft = self._assistant
        if draft is not None and (draft.has_text or draft.tool_calls):
            self._assistant = None
        self._open_assistant(reader.path).reasoning.append(text)

    def _add_call(self, reader: ObjectReader, kind: str) -> None:
        name = function_name(reader.text("name"), reader.optional_text("namespace"))
        if kind == "custom_tool_call":
            arguments = encode_custom_arguments(reader.text(CUSTOM_INPUT))
        else:
            arguments = reader.text("arguments")
        call = {
            "id": reader.identifier("call_id"),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self._open_assistant(reader.path).tool_calls.append(call)

    def _add_call_output(self, reader: ObjectReader) -> None:
        message = {
            "role": "tool",
            "tool_call_id": reader.identifier("call_id"),
            "content": _read_content(reader, "output"),
        }
        self._append(message, _content_path(reader, "output"))

    def _open_assistant(self, path: str) -> _AssistantDraft:
        if self._assistant is None:
            draft = _AssistantDraft()
            self._append(draft, path)
            self._assistant = draft
        return self._assistant

    def _append(self, message: dict[str, Any] | _AssistantDraft, path: str) -> None:
        self._messages.append(message)
        self.paths.append(path)
        self._assistant = None


def _content_path(reader: ObjectReader, name: str) -> str:
    """Return the path of an item's text in the request, such as ``input[3].content`` for an item of
    the list ``input``. For an input that is a string, the path is ``input``; for an item of an
    earlier response, it is ``previous_response_id``."""
    return f"{reader.path}.{name}" if reader.path.endswith("]") else reader.path


def _read_content(reader: ObjectReader, name: str) -> str:
    """Return the text of a message or of a tool's output: a string, or a list of text parts."""
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
    """Return the reasoning of an item: its content, else its ``encrypted_content`` if Baton can
    read it, else its summary."""
    content = _read_texts(reader, "content")
    if content:
        return content
    encrypted = reader.optional_text("encrypted_content")
    kept = decode_reasoning(encrypted) if encrypted is not None else None
    return kept or _read_texts(reader, "summary")


def _read_texts(reader: ObjectReader, name: str) -> str:
    parts = reader.optional_list(name)
    return PARAGRAPH.join(
        ObjectReader(part, f"{reader.path}.{name}[{number}]").text("text")
        for number, part in enumerate(parts)
    )


def missing_input() -> ApiError:
    message = "Missing required parameter: input"
    return ApiError(400, message, param="input", code="missing_required_parameter")
