"""Turns a request of the Responses API into a chat."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.errors import ApiError
from router.http.body_parser import validate_fields
from router.openai.schema import ChatBody
from router.openai.schema.sampling_fields import SamplingFields
from router.responses.chat_errors import translate_error
from router.responses.chat_messages import ChatMessages, missing_input
from router.responses.schema import InputTokensBody, ResponsesBody
from router.responses.tools import OfferedTools, read_tools, to_chat_tool_choice

SAMPLING_FIELDS = frozenset(SamplingFields.model_fields)
SHARED_FIELDS = SAMPLING_FIELDS | {
    "model", "parallel_tool_calls", "chat_template_kwargs", "stream", "user", "metadata",
    "safety_identifier", "prompt_cache_key", "structured_outputs",
}  # fmt: skip
"""Fields that have the same name and meaning in a chat."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat that was made from a request, and the data of the request that its answer needs.
    ``message_paths`` are the places in the request from which the texts of the chat's messages
    come. ``ignored`` are the parts of the request that have no effect."""

    chat: ChatBody
    tools: OfferedTools
    message_paths: Sequence[str]
    ignored: Sequence[str]


def build_chat(body: InputTokensBody, items: Sequence[Any], history: Sequence[Any]) -> ChatRequest:
    """Build the chat for a request. ``items`` are the request's input items, and ``history`` has
    the items of the conversation that it continues. Raises ApiError (400), which names the invalid
    field."""
    tools = read_tools(body.tools or ())
    messages = _build_messages(body, items, history)
    fields = {name: getattr(body, name) for name in body.model_fields_set & SHARED_FIELDS}
    fields |= {
        "messages": messages.messages,
        "tools": tools.functions or None,
        "tool_choice": to_chat_tool_choice(body.tool_choice, tools),
        "response_format": _response_format(body),
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
    }
    if isinstance(body, ResponsesBody):
        fields |= _answer_fields(body)
    try:
        chat = validate_fields(ChatBody, fields)
    except ApiError as error:
        raise translate_error(error, messages.paths, tools.paths) from error
    ignored = [*tools.ignored, *messages.ignored]
    return ChatRequest(chat, tools, messages.paths, ignored)


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


def _response_format(body: InputTokensBody) -> dict[str, Any] | None:
    if body.text is None or body.text.format is None:
        return None
    return body.text.format.chat_format


def _answer_fields(body: ResponsesBody) -> dict[str, Any]:
    """Return the chat's fields that concern the answer."""
    num_logprobs = body.num_logprobs
    hides_sizes = body.stream_options is not None and body.stream_options.include_obfuscation
    return {
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": num_logprobs is not None,
        "top_logprobs": num_logprobs,
        "stream_options": {"include_obfuscation": True} if hides_sizes else None,
    }
