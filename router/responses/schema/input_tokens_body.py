"""The body of POST /v1/responses/input_tokens: the fields that become the prompt."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from router.openai.schema.chat import Variables
from router.openai.schema.strict_model import (
    RequestBody,
    ignored_unless,
    unsupported_field,
    validation_error,
)
from router.openai.schema.tool import MAX_TOOLS
from router.responses.schema.reasoning_config import ReasoningConfig
from router.responses.schema.text_config import TextConfig

MAX_ITEMS = 16_384
MAX_ID_CHARACTERS = 128


def _check_input(value: Any) -> Any:
    """Check that the input is a text or a list. The items of a list are checked later, when they
    are read."""
    if not isinstance(value, str | list | None):
        raise validation_error("the value must be a string or a list of items")
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        raise validation_error(f"the input may have at most {MAX_ITEMS} items")
    return value


Input = Annotated[Any, AfterValidator(_check_input)]
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARACTERS)]


class InputTokensBody(RequestBody):
    """The fields that become the prompt. ``tool_choice`` and each of the ``tools`` are checked
    later, when they are read."""

    input: Input = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    truncation: Annotated[Literal["auto", "disabled"] | None, ignored_unless("disabled")] = None
    """Has no effect: nothing is ever dropped from the input, and an input that is too long is
    refused."""
    conversation: Annotated[
        Any, unsupported_field("there are no conversations; use previous_response_id")
    ] = None
    personality: Annotated[
        Any, unsupported_field("the model has none; describe one in instructions")
    ] = None
    # Not in OpenAI's API
    chat_template_kwargs: Variables | None = None
