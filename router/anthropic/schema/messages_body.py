"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from baton.core.grammar import Grammar
from router.anthropic.chat_messages import ChatMessages
from router.anthropic.schema.content_block import CacheControl, MessageParams, TextContent
from router.anthropic.schema.tool import CustomTool, ServerTool, ToolChoiceParam, ToolParams
from router.errors import invalid_field
from router.http.body_parser import validate_value
from router.http.unknown_fields import UnsupportedField
from router.openai.schema import ChatBody
from router.openai.schema.chat_hints import ChatHints
from router.serving.request import Chat, FieldNames, GenerationRequest
from router.serving.schema.message import MESSAGES
from router.serving.schema.response_format import check_format, json_schema_grammar
from router.serving.schema.sampling_fields import (
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    SamplingFields,
    StopTokenIds,
)
from router.serving.schema.strict_model import INTEGRAL, RequestBody, StrictModel, unsupported_field
from router.serving.schema.tool import TOOLS, ToolUse
from router.serving.schema.unsupported_fields import UNSUPPORTED_FIELDS


class ThinkingConfig(StrictModel):
    """Whether the model reasons before it answers. ``budget_tokens`` is a hint without effect:
    ``max_tokens`` limits the reasoning and the answer together."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonOutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]

    @property
    def grammar(self) -> Grammar:
        return json_schema_grammar(self.schema_)


class OutputConfig(StrictModel):
    """How much the model reasons, and the form of its answer. ``task_budget`` is a hint without
    effect."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None
    task_budget: Annotated[Any, WithJsonSchema({"description": "Ignored."})] = None


Hint = Annotated[Any, WithJsonSchema({"description": "Ignored."})]

DEFAULT_EFFORT = "high"
"""The reasoning effort if a request enables reasoning without naming an effort, as in Anthropic's
API."""


class PromptBody(RequestBody):
    """The fields of a request that determine its prompt."""

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

    @property
    def hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def ignored_fields(self) -> list[str]:
        """The names of given fields that have no effect, although the client may rely on them:
        tools that Anthropic's servers run, tools that only code execution may call, and changes of
        the context."""
        names = [f"tools.{tool.type}" for tool in self.tools or () if isinstance(tool, ServerTool)]
        names += [f"tools.{tool.name}" for _, tool in self._custom_tools if not tool.is_offered]
        given = {
            "mcp_servers": self.mcp_servers,
            "context_management": self.context_management,
            "compaction": self.compaction,
            "output_config.task_budget": self.output_config and self.output_config.task_budget,
        }
        return names + [name for name, value in given.items() if value]

    def to_chat(self) -> Chat:
        """Return the chat that the request is. Raises ApiError (400)."""
        self._check_tool_choice()
        drafts = ChatMessages()
        drafts.add_tools(tool.cache_control for _, tool in self._custom_tools)
        drafts.add_system(self.system or ())
        for number, message in enumerate(self.messages):
            drafts.add_message(message, f"messages[{number}]")
        drafts.drop_empty_continuation()
        if self.cache_control is not None:
            drafts.add_final_breakpoint(self.cache_control)
        if drafts.ends_with_assistant and not drafts.can_be_continued:
            field = f"messages[{len(self.messages) - 1}].content"
            reason = (
                "if the last message has the role `assistant`, the model continues it, so it must "
                "have text and no tool_use block"
            )
            raise invalid_field(field, reason)
        offered = [(path, tool) for path, tool in self._custom_tools if tool.is_offered]
        names = FieldNames(
            response_format="output_config.format",
            continuation="messages",
            messages=drafts.sources,
            tools=[f"{path}.input_schema" for path, _ in offered],
        )
        messages = validate_value(MESSAGES, drafts.json, names.prompt, names.messages)
        drafts.mark_breakpoints(messages)
        return Chat(
            messages,
            self._tool_use(offered),
            reasoning_effort=self._effort,
            adds_generation_prompt=not drafts.ends_with_assistant,
            continues_final_message=drafts.ends_with_assistant,
            names=names,
        )

    @property
    def _custom_tools(self) -> Iterator[tuple[str, CustomTool]]:
        """The tools that the client runs, with their places in the request."""
        for number, tool in enumerate(self.tools or ()):
            if isinstance(tool, CustomTool):
                yield f"tools[{number}]", tool

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return
        offered = {tool.name for _, tool in self._custom_tools if tool.is_offered}
        if choice.type == "any" and not offered:
            message = "type `any` is only allowed with tools that the client runs"
            raise invalid_field("tool_choice", message)
        if choice.type == "tool" and choice.name not in offered:
            message = f"{choice.name!r} is not one of the tools that the client runs"
            raise invalid_field("tool_choice.name", message)

    def _tool_use(self, offered: Sequence[tuple[str, CustomTool]]) -> ToolUse:
        if not offered:
            return ToolUse()
        paths = [path for path, _ in offered]
        tools = validate_value(TOOLS, [tool.chat_tool for _, tool in offered], "tools", paths)
        choice = self.tool_choice
        if choice is None:
            return ToolUse.resolve(None, tools)
        return ToolUse.resolve(choice.chat_choice, tools, not choice.disable_parallel_tool_use)

    @property
    def format(self) -> tuple[str, Grammar] | None:
        """The field that constrains the answer, and its grammar. Raises ApiError (400)."""
        config = self.output_config
        given = (config and config.format) or self.output_format
        return None if given is None else check_format("output_config.format", given.grammar)

    @property
    def _effort(self) -> str | None:
        """The reasoning effort, or None to leave it to the model."""
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        effort = self.output_config.effort if self.output_config is not None else None
        return effort or (DEFAULT_EFFORT if self.thinking is not None else None)


class CountTokensBody(PromptBody):
    """The body of POST /v1/messages/count_tokens."""


StopSequence = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]

OWN_FIELDS = ("exact_kv", "ignore_eos", "min_tokens", "stop_token_ids")
"""Fields of chats that are not in Anthropic's API."""

CHAT_FIELDS = {
    name: UnsupportedField("it is a field of chats", (1,) if name == "n" else (0, [], {}))
    for name in ChatBody.model_fields.keys() - ChatHints.model_fields.keys() - {"user", *OWN_FIELDS}
}
"""Fields of chats, most of which change the answer, with the values that change nothing."""


class RequestMetadata(StrictModel):
    user_id: str | None = None


class MessagesBody(PromptBody):
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        **UNSUPPORTED_FIELDS,
        **CHAT_FIELDS,
    }

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: (
        Annotated[list[StopSequence], Field(max_length=MAX_STOPS, fail_fast=True)] | None
    ) = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: RequestMetadata | None = None
    service_tier: str | None = None
    exact_kv: bool | None = None
    """Not in Anthropic's API, and nor are the next three: whether no lossy codec may be applied to
    the request's KV."""
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0), INTEGRAL] | None = None
    stop_token_ids: StopTokenIds | None = None
    container: Annotated[
        Any, unsupported_field("there is no code execution"), WithJsonSchema({"type": "null"})
    ] = None
    thread: Annotated[
        Any,
        unsupported_field("conversations are not kept; send all messages"),
        WithJsonSchema({"type": "null"}),
    ] = None
    # Hints without effect
    diagnostics: Hint = None
    fallback_credit_token: Hint = None
    fallbacks: Hint = None
    inference_geo: Hint = None

    def request(self) -> GenerationRequest:
        """Return what the body asks for. Raises ApiError (400)."""
        sampling = {
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            **{name: getattr(self, name) for name in OWN_FIELDS},
        }
        return GenerationRequest(
            self.to_chat(),
            SamplingFields.model_validate(sampling),
            self.max_tokens,
            caps_max_tokens=True,
            format=self.format,
            stream=bool(self.stream),
        )
