"""A message of a conversation."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from router.anthropic.schema.content_block import (
    ASSISTANT_TYPES,
    TEXT_TYPES,
    USER_TYPES,
    BlockTypes,
    Content,
)
from router.openai.schema.message import MAX_MESSAGES
from router.openai.schema.strict_model import StrictModel, validation_error

ROLE_TYPES: dict[str, BlockTypes] = {
    "user": USER_TYPES,
    "assistant": ASSISTANT_TYPES,
    "system": TEXT_TYPES,
}
"""The types of blocks that messages of each role may have."""


class MessageParam(StrictModel):
    """One message. Unknown fields are ignored, since clients also send back whole answers as
    messages."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _blocks_suit_the_role(self) -> Self:
        types = ROLE_TYPES[self.role]
        for number, block in enumerate(self.content):
            if block.type not in types:
                raise validation_error(
                    f"block {number} of the content has type {block.type!r}, which a message of "
                    f"role {self.role!r} can't have"
                )
        return self


MessageParams = Annotated[
    list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]
