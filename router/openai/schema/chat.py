"""The body of POST /v1/chat/completions."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from baton.core.request import MAX_LOGPROBS
from router.openai.schema.chat_hints import ChatHints
from router.openai.schema.generation_body import GenerationBody
from router.serving.request import Chat, GenerationRequest
from router.serving.schema.message import Messages, check_continuation
from router.serving.schema.strict_model import INTEGRAL, field_validation_error
from router.serving.schema.template_fields import (
    ReasoningField,
    TemplateText,
    ThinkingFields,
    Variables,
)
from router.serving.schema.tool import ToolChoice, Tools, ToolUse


class ChatBody(GenerationBody, ThinkingFields, ChatHints):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1), INTEGRAL] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), INTEGRAL] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: TemplateText | None = None
    # Not in OpenAI's API
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    reasoning: ReasoningField | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise field_validation_error(
                "top_logprobs", "top_logprobs is only allowed with logprobs"
            )
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise field_validation_error(
                "max_completion_tokens",
                "max_tokens and max_completion_tokens differ; give only one of them",
            )
        return self

    @model_validator(mode="after")
    def _continues_an_answer(self) -> Self:
        if self.continue_final_message:
            check_continuation(self.messages, self.add_generation_prompt)
        return self

    @model_validator(mode="after")
    def _take_effort(self) -> Self:
        effort = self.reasoning.effort if self.reasoning is not None else None
        if effort is None:
            return self
        if self.reasoning_effort not in (None, effort):
            raise field_validation_error(
                "reasoning", "reasoning.effort and reasoning_effort differ; give only one of them"
            )
        self.reasoning_effort = effort
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def request(self) -> GenerationRequest:
        """Return what the body asks for. Raises ApiError (400)."""
        prompt = Chat(
            self.messages,
            ToolUse.resolve(self.tool_choice, self.tools or (), self.parallel_tool_calls),
            self.chat_template_kwargs,
            self.thinking_switch,
            self.reasoning_effort,
            self.verbosity,
            adds_generation_prompt=self.add_generation_prompt is not False,
            continues_final_message=bool(self.continue_final_message),
            adds_special_tokens=bool(self.add_special_tokens),
        )
        return GenerationRequest(
            prompt,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            cache_key=self.prompt_cache_key,
            num_prompt_logprobs=self.prompt_logprobs,
            num_candidates=self.num_choices,
            **self._request_fields(),
        )
