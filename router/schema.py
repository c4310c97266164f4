"""Bodies of requests, as OpenAI defines them, with the extensions that vLLM's clients know.

Strict: a wrong type, a number that is none, and an unknown field are errors. ``null`` means
that a field is absent.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from baton.core.request import MAX_LOGPROBS

MAX_CHOICES = 16
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_PROMPTS = 128
MAX_MESSAGES = 16_384
MAX_TOOLS = 128

TokenIds = list[int]


def wrong(message: str) -> PydanticCustomError:
    """A complaint about the field that is being validated."""
    return PydanticCustomError("wrong", "{message}", {"message": message})


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


def _to_prompts(value: Any) -> list[str] | list[TokenIds]:
    """One or many, text or tokens: always a list of prompts, none of them empty."""
    if isinstance(value, str) or (_is_token_ids(value) and value):
        value = [value]
    if not isinstance(value, list):
        raise wrong("must be a string, a list of strings, token ids, or a list of token ids")
    if not value or not all(value):
        raise wrong("must not be empty")
    if len(value) > MAX_PROMPTS:
        raise wrong(f"must have at most {MAX_PROMPTS} prompts")
    if all(isinstance(each, str) for each in value) or all(map(_is_token_ids, value)):
        return value
    raise wrong("must be a string, a list of strings, token ids, or a list of token ids")


def _to_stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise wrong(f"must have at most {MAX_STOPS} stop strings")
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise wrong(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters")
    return stops


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


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise wrong("a tool has type `function` and a `function` object")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise wrong("a tool's function has a name")
    return tool


def _only(*supported: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value not in supported or isinstance(value, bool):
            raise wrong(f"{value!r} is not supported yet, only {supported[-1]!r}")
        return value

    return check


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Message(_Body):
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


class StreamOptions(_Body):
    include_usage: bool | None = None


class Generation(_Body, ABC):
    """What chats and completions have in common."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Annotated[list[str], BeforeValidator(_to_stops)] = Field(default_factory=list)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    response_format: Annotated[Any, AfterValidator(_only(None, {"type": "text"}))] = None
    # Beyond OpenAI's
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS)] | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "field:stream_options", "stream_options is only allowed with stream"
            )
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives wanted beside each token; None for no logprobs."""

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(Generation):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: (
        Annotated[
            list[Annotated[dict[str, Any], AfterValidator(_check_tool)]],
            Field(max_length=MAX_TOOLS),
        ]
        | None
    ) = None
    tool_choice: Annotated[Any, AfterValidator(_only(None, "none", "auto"))] = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(
                "field:top_logprobs", "top_logprobs is only allowed with logprobs"
            )
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise PydanticCustomError(
                "field:max_completion_tokens", "max_tokens and max_completion_tokens differ"
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Generation):
    prompt: Annotated[Any, AfterValidator(_to_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Annotated[Any, AfterValidator(_only("", None))] = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.best_of is not None and self.best_of != self.choices:
            raise PydanticCustomError("field:best_of", "best_of must equal n")
        if self.echo and self.logprobs is not None:
            raise PydanticCustomError(
                "field:echo", "echo with logprobs (of the prompt) is not supported yet"
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeBody(_Body):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: list[Annotated[dict[str, Any], AfterValidator(_check_tool)]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("field:prompt", "give either prompt or messages")
        return self


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: list[int]
