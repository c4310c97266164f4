"""The bodies of POST /tokenize and /detokenize."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from router.openai.schema.chat import Variables
from router.openai.schema.message import Messages, check_continuation
from router.openai.schema.strict_model import RequestBody, field_validation_error
from router.openai.schema.tool import Tools


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


class DetokenizeBody(RequestBody):
    tokens: Annotated[list[int], Field(fail_fast=True)]
