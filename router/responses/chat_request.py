"""Turns a request of the Responses API into a chat."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.grammar import Grammar
from router.errors import ApiError, invalid_field
from router.http.body_parser import validate_value
from router.responses.output_items import decode_reasoning
from router.responses.schema import FORMAT_FIELD, InputTokensBody, ResponsesBody
from router.responses.tools import (
    CUSTOM_INPUT,
    ObjectReader,
    OfferedTools,
    encode_custom_arguments,
    function_name,
    read_tools,
    to_chat_tool_choice,
)
from router.serving.request import Chat, FieldNames, GenerationRequest
from router.serving.schema.message import MESSAGES, RESPONSES_TEXT_TYPES, only_text
from router.serving.schema.response_format import check_format
from router.serving.schema.tool import TOOLS, ToolUse

INPUT_ROLES = ("user", "system", "developer")
TEXT_PARTS = ("text", *RESPONSES_TEXT_TYPES)

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
    return "".join(_read_part(part, f"{path}[{number}]") for number, part in enumerate(content))


def _read_part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    reader = ObjectReader(part, path)
    kind = reader.text("type")
    if kind in TEXT_PARTS:
        return reader.text("text")
    if kind == "refusal":
        return reader.text("refusal")
    raise reader.error("type", only_text(kind))


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
    return invalid_field("input", message, "missing_required_parameter")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat that was made from a request. ``ignored`` are the parts of the request that have no
    effect."""

    chat: Chat
    tools: OfferedTools
    ignored: Sequence[str]


def build_chat(body: InputTokensBody, items: Sequence[Any], history: Sequence[Any]) -> ChatRequest:
    """Build the chat for a request. ``items`` are the request's input items, and ``history`` has
    the items of the conversation that it continues. Raises ApiError (400), which names the invalid
    field."""
    tools = read_tools(body.tools or ())
    drafts = _build_messages(body, items, history)
    names = FieldNames(
        prompt="input",
        max_tokens="max_output_tokens",
        response_format=FORMAT_FIELD,
        messages=drafts.paths,
        tools=[f"{path}.parameters" for path in tools.paths],
    )
    choice = to_chat_tool_choice(body.tool_choice, tools)
    messages = validate_value(MESSAGES, drafts.messages, names.prompt, drafts.paths)
    functions = validate_value(TOOLS, tools.functions, "tools", tools.paths)
    chat = Chat(
        messages,
        ToolUse.resolve(choice, functions, body.parallel_tool_calls),
        body.chat_template_kwargs,
        body.thinking_switch,
        body.reasoning.effort if body.reasoning is not None else None,
        names=names,
    )
    return ChatRequest(chat, tools, [*tools.ignored, *drafts.ignored])


def build_request(body: ResponsesBody, chat: Chat) -> GenerationRequest:
    """Return what the request asks for. Raises ApiError (400)."""
    return GenerationRequest(
        chat,
        body,
        body.max_output_tokens,
        format=_format(body),
        stream=bool(body.stream),
        cache_key=body.prompt_cache_key,
        num_logprobs=body.num_logprobs,
    )


def _build_messages(
    body: InputTokensBody, items: Sequence[Any], history: Sequence[Any]
) -> ChatMessages:
    messages = ChatMessages()
    if body.instructions:
        messages.add_text("system", body.instructions, "instructions")
    for item in history:
        messages.add_item(item, "previous_response_id")
    for number, item in enumerate(items):
        messages.add_item(item, f"input[{number}]" if isinstance(body.input, list) else "input")
    if not messages.paths or (body.input is None and body.previous_response_id is None):
        raise missing_input()
    return messages


def _format(body: ResponsesBody) -> tuple[str, Grammar] | None:
    given = body.text.format.grammar if body.text is not None and body.text.format else None
    outputs = body.structured_outputs
    if outputs is None:
        return None if given is None else check_format(FORMAT_FIELD, given)
    field = "structured_outputs"
    if given is not None:
        raise invalid_field(field, f"{field} is not allowed together with {FORMAT_FIELD}")
    return check_format(field, outputs.grammars[0])
