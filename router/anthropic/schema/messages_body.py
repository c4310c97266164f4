"""The body of POST /v1/messages."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from router.anthropic.schema.prompt_body import Hint, PromptBody
from router.http.unknown_fields import UnsupportedField
from router.openai.schema import ChatBody
from router.openai.schema.chat_hints import ChatHints
from router.openai.schema.sampling_fields import MAX_STOP_CHARACTERS, MAX_STOPS
from router.openai.schema.strict_model import StrictModel, unsupported_field
from router.openai.schema.unsupported_fields import UNSUPPORTED_FIELDS

StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


CHAT_FIELDS = {
    name: UnsupportedField("it is a field of chats", (1,) if name == "n" else (0, [], {}))
    for name in ChatBody.model_fields.keys() - ChatHints.model_fields.keys() - {"user", "exact_kv"}
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
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: RequestMetadata | None = None
    service_tier: str | None = None
    exact_kv: bool | None = None
    """Not in Anthropic's API: whether no lossy codec may be applied to the request's KV."""
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

    def _sampling_fields(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "exact_kv": self.exact_kv,
        }
