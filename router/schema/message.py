"""A turn of a chat."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from router.schema.body import Body, wrong

MAX_MESSAGES = 16_384


def _to_text(value: Any) -> str:
    """A message's content: a string, or its text parts joined."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise wrong("must be a string or a list of text parts")
    return "".join(map(_part_text, value))


def _part_text(part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise wrong("a content part is an object with a type")
    if part["type"] != "text":
        raise wrong(f"content parts of type {part['type']!r} are not supported, only text")
    if not isinstance(part.get("text"), str):
        raise wrong("a text part has a string `text`")
    return str(part["text"])


class Message(Body):
    """One turn. ``tool_calls`` are what an assistant asked for before, in OpenAI's form."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_to_text)] = Field(default="", validate_default=True)
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_content(cls, value: Any) -> Any:
        needs_content = isinstance(value, dict) and value.get("role") != "assistant"
        if needs_content and value.get("content") is None:
            raise wrong("a message has `content`")
        return value


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
