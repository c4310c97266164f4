"""A chat as its model reads it: messages, tools and variables, through the model's template."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import Invalid
from baton.text.tokenizer import SPECIAL_TOKEN_NAMES, Tokenizer
from router.errors import ApiError
from router.http.json_limits import check_json_size
from router.openai.schema import ChatBody, Message, TokenizeBody
from router.openai.schema.tool import Tool
from router.openai.unique_marker import make_unique_marker

RESERVED_TEMPLATE_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
RESERVED_TEMPLATE_VARIABLES |= frozenset(SPECIAL_TOKEN_NAMES)


class ChatRenderer:
    """Renders for one tokenizer. Raises Problem or Invalid, naming what is wrong."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._source = tokenizer.chat_template_source

    def text(self, body: ChatBody | TokenizeBody, tools: Sequence[Tool]) -> str:
        _check_arguments(body.messages or ())
        messages = [_template_message(message) for message in body.messages or ()]
        mark = ""
        if body.continue_final_message:
            mark = make_unique_marker(message.content for message in body.messages or ())
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{mark}"}
        text = self._tokenizer.apply_chat_template(
            messages,
            list(tools) or None,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=self._variables(body),
        )
        return _text_before_marker(mark, text) if mark else text

    def knows(self, variable: str) -> bool:
        """Whether the template speaks of it."""
        return re.search(rf"\b{re.escape(variable)}\b", self._source) is not None

    def _variables(self, body: ChatBody | TokenizeBody) -> dict[str, Any]:
        variables = dict(body.chat_template_kwargs or {})
        for name in variables:
            if name in RESERVED_TEMPLATE_VARIABLES or not self.knows(name):
                reason = (
                    "has a field of its own"
                    if name in RESERVED_TEMPLATE_VARIABLES
                    else "is not in the template"
                )
                message = f"chat_template_kwargs: {name!r} {reason} of the model's chats"
                raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value")
        if isinstance(body, ChatBody) and body.reasoning_effort is not None:
            variables = {**self._effort(body.reasoning_effort), **variables}
        return variables

    def _effort(self, effort: str) -> dict[str, Any]:
        """As a grade where the template knows grades, else as a switch, else not at all."""
        if self.knows("reasoning_effort"):
            return {"reasoning_effort": effort}
        if self.knows("enable_thinking"):
            return {"enable_thinking": effort != "none"}
        return {}


def _template_message(message: Message) -> Mapping[str, Any]:
    fields = message.model_dump(exclude_none=True, exclude={"refusal", "cache_control"})
    fields["content"] = message.content or message.refusal or ""
    if message.tool_calls is not None:
        fields["tool_calls"] = [_template_tool_call(call) for call in message.tool_calls]
    return fields


def _check_arguments(messages: Sequence[Message]) -> None:
    """Raises Problem (400): arguments are JSON within JSON, and hold as much."""
    functions = [call["function"] for message in messages for call in message.tool_calls or ()]
    texts = [each["arguments"] for each in functions if isinstance(each["arguments"], str)]
    check_json_size(",".join(texts).encode(errors="replace"))


def _template_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates want the arguments as an object; OpenAI sends them as JSON."""
    function = call["function"]
    if isinstance(function["arguments"], dict):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _text_before_marker(mark: str, text: str) -> str:
    """Raises Invalid for a template that does not show the end of the last message."""
    before, found, _ = text.rpartition(mark)
    if not found:
        raise Invalid(
            "the model's chat template does not show the last message as it is",
            param="continue_final_message",
        )
    return before
