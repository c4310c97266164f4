"""Fields of OpenAI's chat API that don't change what is generated.

Fields that only inform OpenAI's platform are accepted; the client is told about values that have no
effect here. Fields that request features that Baton lacks are refused, with the reason.
docs/openai.md lists both.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from router.serving.schema.strict_model import (
    StrictModel,
    ignored_unless,
    unsupported_field,
    validation_error,
)
from router.serving.schema.template_fields import TemplateText

MAX_METADATA = 16

Label = Annotated[str, Field(max_length=64)]
Note = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Label, Note], Field(max_length=MAX_METADATA)]


def _check_modalities(value: Any) -> Any:
    if value not in (None, ["text"]):
        raise validation_error('only the value ["text"] is supported')
    return value


def _check_prediction(value: Any) -> Any:
    """Check and drop the field. In OpenAI's API, a good prediction makes the answer faster and does
    not change it."""
    if value is not None and (
        not isinstance(value, dict)
        or value.get("type") != "content"
        or not isinstance(value.get("content"), str | list)
    ):
        raise validation_error('the value must be like {"type": "content", "content": "…"}')
    return None


class ChatHints(StrictModel):
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Annotated[str | None, ignored_unless("auto", "default")] = None
    store: Annotated[bool | None, ignored_unless(False)] = None
    verbosity: TemplateText | None = None
    modalities: Annotated[Any, AfterValidator(_check_modalities)] = None
    prediction: Annotated[Any, AfterValidator(_check_prediction)] = None
    prompt_cache_retention: Annotated[str | None, ignored_unless("in_memory")] = None
    prompt_cache_options: Annotated[Any, ignored_unless()] = None
    audio: Annotated[Any, unsupported_field("the model supports only text")] = None
    web_search_options: Annotated[
        Any, unsupported_field("there is no search; offer one as a tool")
    ] = None
    moderation: Annotated[Any, unsupported_field("there is no moderation")] = None
    functions: Annotated[Any, unsupported_field("deprecated by OpenAI; use tools")] = None
    function_call: Annotated[Any, unsupported_field("deprecated by OpenAI; use tool_choice")] = None
    chat_template: Annotated[
        Any,
        unsupported_field("a template is code, so only the model's own template is used"),
    ] = None
