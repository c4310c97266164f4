"""The fields of a request that determine its prompt, and the body of POST
/v1/messages/count_tokens."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Self

from pydantic import PrivateAttr, ValidationError, WithJsonSchema, model_validator

from router.anthropic.chat_messages import SYSTEM_SOURCE, ChatMessages
from router.anthropic.schema.cache_control import CacheControl
from router.anthropic.schema.content_block import TextContent
from router.anthropic.schema.message import MessageParams
from router.anthropic.schema.output_config import JsonOutputFormat, OutputConfig
from router.anthropic.schema.thinking import ThinkingConfig
from router.anthropic.schema.tool import CustomTool, ServerTool, ToolParams
from router.anthropic.schema.tool_choice import ToolChoiceParam
from router.openai.schema import ChatBody
from router.openai.schema.strict_model import (
    RequestBody,
    field_validation_error,
)

Hint = Annotated[Any, WithJsonSchema({"description": "Ignored."})]

DEFAULT_EFFORT = "high"
"""The reasoning effort if a request enables reasoning without naming an effort, as in Anthropic's
API."""


class PromptBody(RequestBody):
    """A request, and the chat that it is converted to."""

    messages: MessageParams
    system: TextContent | None = None
    tools: ToolParams | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None
    cache_control: CacheControl | None = None
    # Hints and offers without effect
    betas: Hint = None
    billing_policy: Hint = None
    compaction: Hint = None
    context_management: Hint = None
    mcp_servers: Hint = None
    speed: Hint = None
    user_profile_id: Hint = None
    workspace_id: Hint = None

    _chat: ChatBody = PrivateAttr()
    _sources: list[str] = PrivateAttr(default_factory=list)

    @property
    def chat(self) -> ChatBody:
        return self._chat

    def source_of(self, param: str) -> str:
        """Return the request's field from which the chat's field ``param`` comes, such as
        ``system`` for ``messages[0].content``."""
        found = re.match(r"messages\[(\d+)\]", param)
        return _content_of(self._sources[int(found[1])]) if found else param

    @property
    def hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def ignored_fields(self) -> list[str]:
        """The names of given fields that have no effect, although the client may rely on them:
        tools that Anthropic's servers run, tools that only code execution may call, and changes of
        the context."""
        names = [f"tools.{tool.type}" for tool in self.tools or () if isinstance(tool, ServerTool)]
        names += [f"tools.{tool.name}" for tool in self._custom_tools if not tool.is_offered]
        given = {
            "mcp_servers": self.mcp_servers,
            "context_management": self.context_management,
            "compaction": self.compaction,
            "output_config.task_budget": self.output_config and self.output_config.task_budget,
        }
        return names + [name for name, value in given.items() if value]

    @model_validator(mode="after")
    def _become_a_chat(self) -> Self:
        self._check_tool_choice()
        chat_messages = self._chat_messages()
        self._sources = chat_messages.sources
        self._chat = self._create_chat(chat_messages)
        return self

    def _create_chat(self, chat_messages: ChatMessages) -> ChatBody:
        """Create the chat. Raises validation errors."""
        fields = {
            "model": self.model,
            "messages": chat_messages.json,
            **self._continuation_fields(chat_messages),
            **self._tool_fields(),
            **self._output_fields(),
            **self._sampling_fields(),
        }
        try:
            chat = ChatBody.model_validate(fields)
        except ValidationError as error:
            _raise_about_source(error, chat_messages.sources)
            raise
        chat_messages.mark_breakpoints(chat.messages)
        return chat

    def _chat_messages(self) -> ChatMessages:
        chat_messages = ChatMessages()
        chat_messages.add_tools(tool.cache_control for tool in self._custom_tools)
        chat_messages.add_system(self.system or ())
        for number, message in enumerate(self.messages):
            chat_messages.add_message(message, f"messages[{number}]")
        chat_messages.drop_empty_continuation()
        if self.cache_control is not None:
            chat_messages.add_final_breakpoint(self.cache_control)
        return chat_messages

    def _sampling_fields(self) -> dict[str, Any]:
        """Return the chat's fields about sampling and the answer. Overridden for requests that have
        such fields."""
        return {}

    def _continuation_fields(self, chat_messages: ChatMessages) -> dict[str, Any]:
        """Return the fields that make the model continue the last message, if it is the
        assistant's."""
        if not chat_messages.ends_with_assistant:
            return {}
        if not chat_messages.can_be_continued:
            raise field_validation_error(
                f"messages[{len(self.messages) - 1}].content",
                "if the last message has the role `assistant`, the model continues it, so it must "
                "have text and no tool_use block",
            )
        return {"continue_final_message": True, "add_generation_prompt": False}

    @property
    def _custom_tools(self) -> Iterator[CustomTool]:
        return (tool for tool in self.tools or () if isinstance(tool, CustomTool))

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return
        offered = {tool.name for tool in self._custom_tools if tool.is_offered}
        if choice.type == "any" and not offered:
            message = "type `any` is only allowed with tools that the client runs"
            raise field_validation_error("tool_choice", message)
        if choice.type == "tool" and choice.name not in offered:
            message = f"{choice.name!r} is not one of the tools that the client runs"
            raise field_validation_error("tool_choice.name", message)

    def _tool_fields(self) -> dict[str, Any]:
        tools = [tool.chat_tool for tool in self._custom_tools if tool.is_offered]
        if not tools:
            return {}
        fields: dict[str, Any] = {"tools": tools}
        if self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice.chat_choice
            if self.tool_choice.disable_parallel_tool_use:
                fields["parallel_tool_calls"] = False
        return fields

    def _output_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        effort = self._effort
        if effort is not None:
            fields["reasoning_effort"] = effort
        config = self.output_config
        output_format = (config and config.format) or self.output_format
        if output_format is not None:
            fields["response_format"] = output_format.response_format
        return fields

    @property
    def _effort(self) -> str | None:
        """The reasoning effort, or None to leave it to the model."""
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        effort = self.output_config.effort if self.output_config is not None else None
        return effort or (DEFAULT_EFFORT if self.thinking is not None else None)


def _raise_about_source(error: ValidationError, sources: Sequence[str]) -> None:
    """If the first error is about a message of the chat, raise an error about the request's field
    that this message comes from."""
    first = error.errors(include_url=False, include_input=False)[0]
    match first["loc"]:
        case ("messages", int(number), *_):
            field = _content_of(sources[number])
            raise field_validation_error(field, f"{field}: {first['msg']}") from error


def _content_of(source: str) -> str:
    return source if source == SYSTEM_SOURCE else f"{source}.content"


class CountTokensBody(PromptBody):
    """The body of POST /v1/messages/count_tokens."""
