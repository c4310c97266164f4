"""What one request asks for, whatever API it came through."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.grammar import Grammar
from router.errors import invalid_field
from router.serving.schema.message import Message
from router.serving.schema.sampling_fields import SamplingFields
from router.serving.schema.template_fields import THINKING_SWITCHES
from router.serving.schema.tool import ToolUse


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What the client's API calls the fields that errors are about. ``messages`` and ``tools`` are
    the places in the request from which the texts of the chat's messages and the schemas of its
    tools come; without them, the request has them in OpenAI's form."""

    prompt: str = "messages"
    max_tokens: str = "max_tokens"
    response_format: str = "response_format"
    continuation: str = "continue_final_message"
    top_logprobs: str = "top_logprobs"
    messages: Sequence[str] = ()
    tools: Sequence[str] = ()

    def message(self, number: int) -> str:
        return self.messages[number] if self.messages else f"messages[{number}].content"

    def tool_schema(self, number: int) -> str:
        return self.tools[number] if self.tools else f"tools[{number}].function.parameters"


CHAT_NAMES = FieldNames()


@dataclass(slots=True)
class Chat:
    """A prompt that the chat template renders. ``template_variables`` are the client's own;
    ``thinking_switch`` is a field that switches reasoning on or off, and its value."""

    messages: Sequence[Message]
    tools: ToolUse = field(default_factory=ToolUse)
    template_variables: dict[str, Any] | None = None
    thinking_switch: tuple[str, bool] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    adds_generation_prompt: bool = True
    continues_final_message: bool = False
    adds_special_tokens: bool = False
    names: FieldNames = CHAT_NAMES

    @property
    def disables_reasoning(self) -> bool:
        """Whether the request switches reasoning off: by a template variable in
        :data:`THINKING_SWITCHES` or, if it sets none of these, by :attr:`thinking_switch` or, if
        there is none, by ``reasoning_effort: none``."""
        variables = self.template_variables or {}
        values = [variables[name] for name in THINKING_SWITCHES if name in variables]
        if not values and self.thinking_switch is not None:
            values = [self.thinking_switch[1]]
        return any(value is False for value in values) or (
            not values and self.reasoning_effort == "none"
        )


@dataclass(slots=True)
class Texts:
    """Prompts that are texts or token ids. If ``is_prompt_only`` is True, the client wants only the
    prompts or their logprobs."""

    prompts: Sequence[str | list[int]]
    echo: bool = False
    is_prompt_only: bool = False
    adds_special_tokens: bool = True
    names: FieldNames = FieldNames(prompt="prompt", top_logprobs="logprobs")


@dataclass(slots=True)
class GenerationRequest:
    """What to generate. ``max_tokens`` is the client's limit on an answer's tokens, or None; if
    ``caps_max_tokens`` is True, a limit beyond the model's context is reduced to the rest of the
    context, otherwise it is refused. ``format`` is the field that constrains the answers, and its
    grammar. ``num_logprobs`` and ``num_prompt_logprobs`` are numbers of alternatives for each
    token; None for no logprobs. For each prompt, ``num_candidates`` answers are generated, of which
    the client gets the ``num_choices`` best. Raises ApiError (400) if the fields do not agree."""

    prompt: Chat | Texts
    sampling: SamplingFields
    max_tokens: int | None = None
    caps_max_tokens: bool = False
    format: tuple[str, Grammar] | None = None
    stream: bool = False
    cache_key: str | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    num_choices: int = 1
    num_candidates: int = 1
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    prompt_logprobs_field: str = "prompt_logprobs"
    return_token_ids: bool = False
    reports_running_usage: bool = False

    def __post_init__(self) -> None:
        min_tokens = self.sampling.min_tokens
        if min_tokens and self.format is not None:
            raise invalid_field("min_tokens", "min_tokens is not allowed with a response format")
        rules = "allowed_token_ids" if self.allowed_token_ids else ""
        rules = rules or ("bad_words" if self.bad_words else "")
        if rules and (self.format is not None or min_tokens):
            other = "min_tokens" if self.format is None else self.format[0]
            raise invalid_field(rules, f"{rules} is not allowed together with {other}")
        if not isinstance(self.prompt, Chat):
            return
        tools = self.prompt.tools
        if tools.is_forced or self.follows_strict_tools:
            for name in ("min_tokens" if min_tokens else "", rules):
                if name:
                    message = f"{name} is not allowed with forced or strict tool calls"
                    raise invalid_field(name, message)
        if tools.is_forced and self.format is not None:
            name = self.format[0]
            if name != self.prompt.names.response_format:
                raise invalid_field(name, f"{name} is not allowed with a forced tool call")

    @property
    def tools(self) -> ToolUse:
        """The tools of a chat; no tools for texts."""
        return self.prompt.tools if isinstance(self.prompt, Chat) else ToolUse()

    @property
    def follows_strict_tools(self) -> bool:
        """Whether calls to strict tools restrict an answer that no response format restricts."""
        return self.format is None and self.tools.has_strict
