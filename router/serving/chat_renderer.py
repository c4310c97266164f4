"""Renders a chat (messages, tools and template variables) to its prompt text with the model's chat
template."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from baton.errors import Invalid
from baton.text.template_messages import REASONING_KEY
from baton.text.tokenizer import SPECIAL_TOKEN_NAMES, Tokenizer
from router.errors import ApiError, invalid_field
from router.http.ignored_fields import IgnoredFields
from router.http.json_limits import check_json_size
from router.http.nesting import is_nested_deeper
from router.http.unknown_fields import closest_name
from router.serving.request import Chat
from router.serving.schema.message import OTHER_REASONING_FIELDS, Message
from router.serving.schema.template_fields import THINKING_SWITCHES
from router.serving.schema.tool import MAX_TOOL_NESTING

RESERVED_TEMPLATE_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
RESERVED_TEMPLATE_VARIABLES |= frozenset(SPECIAL_TOKEN_NAMES)

CALL_LEVELS = 3
"""The levels around the arguments of tool calls: the list, the call and its function."""

_NAME = re.compile(r"\b[a-zA-Z_]\w{2,63}\b")


class ChatRenderer:
    """Renders chats with the chat template of one tokenizer. Raises ApiError or Invalid for a chat
    that the template does not allow."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._source = tokenizer.chat_template_source

    def render(self, chat: Chat, max_characters: int) -> str:
        """Return the text of the prompt, which may have at most ``max_characters``."""
        _check_arguments(chat.messages)
        messages = [_template_message(message, chat.names.prompt) for message in chat.messages]
        marker = ""
        if chat.continues_final_message:
            marker = make_unique_marker(message.content for message in chat.messages)
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{marker}"}
        text = self._tokenizer.apply_chat_template(
            messages,
            list(chat.tools.offered) or None,
            add_generation_prompt=chat.adds_generation_prompt,
            variables=self._variables(chat),
            max_characters=max_characters,
        )
        return _text_before_marker(marker, text, chat.names.continuation) if marker else text

    def has_variable(self, variable: str) -> bool:
        """Whether the template mentions a variable."""
        return re.search(rf"\b{re.escape(variable)}\b", self._source) is not None

    def _variables(self, chat: Chat) -> dict[str, Any]:
        variables = dict(chat.template_variables or {})
        for name in variables:
            if name in RESERVED_TEMPLATE_VARIABLES or not self.has_variable(name):
                raise self._variable_error(name)
        variables |= self._switch_variables(chat)
        if chat.reasoning_effort is not None:
            variables = {**self._reasoning_effort_variables(chat.reasoning_effort), **variables}
        if chat.verbosity and self.has_variable("verbosity"):
            variables = {"verbosity": chat.verbosity, **variables}
        return variables

    def drop_ineffective_fields(self, chat: Chat, ignored: IgnoredFields) -> None:
        """Add to ``ignored`` the names of fields and template variables that have no effect because
        the template does not mention them, and remove these variables from ``chat``. A variable
        that looks like a typo is kept, and so is any variable if unknown fields are refused;
        :meth:`render` then raises an error."""
        if chat.verbosity not in (None, "medium") and not self.has_variable("verbosity"):
            ignored.add("verbosity")
        if chat.thinking_switch is not None and self._thinking_variable is None:
            ignored.add(chat.thinking_switch[0])
        if not chat.template_variables or ignored.is_strict:
            return
        dropped = [name for name in chat.template_variables if self._is_ineffective(name)]
        for name in dropped:
            del chat.template_variables[name]
            ignored.add(f"chat_template_kwargs.{name}")

    def _is_ineffective(self, variable: str) -> bool:
        if variable in RESERVED_TEMPLATE_VARIABLES or self.has_variable(variable):
            return False
        return self._meant_name(variable) is None

    def _meant_name(self, variable: str) -> str | None:
        """Return the name in the template that an unknown variable is probably a typo of, or None.
        Only names with the same first letter are compared, because a template contains hundreds of
        names."""
        return closest_name(variable, _names_in(self._source, variable[:1]))

    def _variable_error(self, name: str) -> ApiError:
        is_reserved = name in RESERVED_TEMPLATE_VARIABLES
        reason = "is a reserved variable" if is_reserved else "is not a variable"
        message = f"chat_template_kwargs: {name!r} {reason} of the model's chat template"
        meant = None if is_reserved else self._meant_name(name)
        if meant is not None:
            message += f"; did you mean {meant!r}?"
        return invalid_field("chat_template_kwargs", message)

    @property
    def _thinking_variable(self) -> str | None:
        """The variable by which the template is told whether the model reasons, if it has one."""
        return next(filter(self.has_variable, THINKING_SWITCHES), None)

    def _switch_variables(self, chat: Chat) -> dict[str, Any]:
        """Return the variable that passes the request's own switch, unless its
        ``chat_template_kwargs`` have one."""
        switch, variable = chat.thinking_switch, self._thinking_variable
        is_free = not chat.template_variables or chat.template_variables.keys().isdisjoint(
            THINKING_SWITCHES
        )
        return {variable: switch[1]} if is_free and switch and variable else {}

    def _reasoning_effort_variables(self, effort: str) -> dict[str, Any]:
        """Return the template variables that pass the effort: ``reasoning_effort`` if the template
        has that variable, else the switch ``enable_thinking``; none if the template has neither."""
        if self.has_variable("reasoning_effort"):
            return {"reasoning_effort": effort}
        if self.has_variable("enable_thinking"):
            return {"enable_thinking": effort != "none"}
        return {}


@lru_cache(maxsize=64)
def _names_in(source: str, first_letter: str) -> frozenset[str]:
    return frozenset(name for name in _NAME.findall(source) if name.startswith(first_letter))


def _template_message(message: Message, field: str) -> Mapping[str, Any]:
    fields = message.model_dump(
        exclude_none=True, exclude={"refusal", "cache_control", *OTHER_REASONING_FIELDS}
    )
    fields["content"] = message.content or message.refusal or ""
    if message.reasoning_text:
        fields[REASONING_KEY] = message.reasoning_text
    if message.tool_calls is not None:
        fields["tool_calls"] = _template_tool_calls(message.tool_calls, field)
    return fields


def _template_tool_calls(calls: Sequence[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    """Return the tool calls of a message for the template. Raises ApiError (400) for arguments that
    are nested too deeply."""
    converted = [_template_tool_call(call) for call in calls]
    if is_nested_deeper(converted, CALL_LEVELS + MAX_TOOL_NESTING):
        text = f"the arguments of a tool call may be nested at most {MAX_TOOL_NESTING} levels deep"
        raise invalid_field(field, f"{field}: {text}")
    return converted


def _check_arguments(messages: Sequence[Message]) -> None:
    """Check that the arguments of tool calls do not contain too many JSON values or strings. The
    arguments are JSON text within strings, so the check of the body did not count what they
    contain. Raises ApiError (400)."""
    functions = [call["function"] for message in messages for call in message.tool_calls or ()]
    texts = [each["arguments"] for each in functions if isinstance(each["arguments"], str)]
    check_json_size(",".join(texts).encode(errors="replace"))


def _template_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return the tool call with its arguments converted from JSON text, as clients of OpenAI's API
    send them, to an object. Text that is not a JSON object, such as an answer that ``max_tokens``
    has cut off, stays as it is."""
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


def _text_before_marker(marker: str, text: str, field: str) -> str:
    """Return the text before the marker, which was appended to the last message. Raises Invalid if
    the template changes the end of that message, so that the marker is missing."""
    before, found, _ = text.rpartition(marker)
    if not found:
        raise Invalid(
            "the last message can't be continued, since the model's chat template changes its end",
            param=field,
        )
    return before


def make_unique_marker(texts: Iterable[str]) -> str:
    """Return a marker that occurs in none of ``texts``: it contains their digest, which nobody can
    put into them. It begins and ends with a private-use character, so that templates leave it
    alone."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode(errors="replace"))
    return f"\ue000{digest.hexdigest()}\ue000"
