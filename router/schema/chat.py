"""POST /v1/chat/completions."""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from baton.core.request import MAX_LOGPROBS
from router.schema.body import only, wrong_field
from router.schema.generation import Generation
from router.schema.message import Messages
from router.schema.tool import Tools


class ChatBody(Generation):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: Annotated[Any, AfterValidator(only(None, "none", "auto"))] = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong_field("top_logprobs", "top_logprobs is only allowed with logprobs")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise wrong_field(
                "max_completion_tokens", "max_tokens and max_completion_tokens differ"
            )
        return self

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
