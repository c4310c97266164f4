"""The bodies of POST /tokenize and /detokenize."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from router.serving.request import Chat
from router.serving.schema.message import Messages, check_continuation
from router.serving.schema.strict_model import RequestBody, field_validation_error
from router.serving.schema.template_fields import Variables
from router.serving.schema.tool import Tools, ToolUse


class TokenizeBody(RequestBody):
    """The body of POST /tokenize, which has either a prompt or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise field_validation_error("prompt", "the body must have either prompt or messages")
        if self.continue_final_message:
            check_continuation(self.messages or (), self.add_generation_prompt)
        return self

    def to_chat(self) -> Chat | None:
        """Return the chat that the messages are; None for a prompt."""
        if self.messages is None:
            return None
        return Chat(
            self.messages,
            ToolUse(offered=self.tools or ()),
            self.chat_template_kwargs,
            adds_generation_prompt=self.add_generation_prompt is not False,
            continues_final_message=bool(self.continue_final_message),
            adds_special_tokens=bool(self.add_special_tokens),
        )


class DetokenizeBody(RequestBody):
    tokens: Annotated[list[int], Field(fail_fast=True)]
