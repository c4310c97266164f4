"""The body of POST /v1/completions."""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from baton.core.request import MAX_LOGPROBS
from router.limits import MAX_CHOICES
from router.openai.schema.generation_body import MAX_ANSWERS, GenerationBody
from router.serving.request import GenerationRequest, Texts
from router.serving.schema.strict_model import (
    INTEGRAL,
    field_validation_error,
    only_values,
    validation_error,
)

MAX_PROMPTS = 1024

TokenIds = list[int]


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


def _to_prompts(value: Any) -> list[str] | list[TokenIds]:
    """Convert one prompt or several, of text or token ids, to a list. No prompt may be empty."""
    if isinstance(value, str) or (_is_token_ids(value) and value):
        value = [value]
    if isinstance(value, list) and len(value) > MAX_PROMPTS:
        raise validation_error(f"a request may have at most {MAX_PROMPTS} prompts")
    if not isinstance(value, list) or not (
        all(isinstance(each, str) for each in value) or all(map(_is_token_ids, value))
    ):
        raise validation_error(
            "the value must be a string, a list of strings, a list of token ids, or a list of "
            "lists of token ids"
        )
    if not value or not all(value):
        raise validation_error("a prompt must not be empty")
    return value


class CompletionBody(GenerationBody):
    prompt: Annotated[Any, AfterValidator(_to_prompts)]
    max_tokens: Annotated[int, Field(ge=0), INTEGRAL] | None = None
    """If 0, only the prompt is computed, for ``echo`` or ``prompt_logprobs``."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), INTEGRAL] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES), INTEGRAL] | None = None
    suffix: Annotated[Any, only_values("", why="the model can't fill in the middle")] = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.num_candidates < self.num_choices:
            raise field_validation_error(
                "best_of", f"best_of must be at least n ({self.num_choices})"
            )
        if self.stream and self.num_candidates > self.num_choices:
            raise field_validation_error("best_of", "best_of must equal n when stream is true")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            message = "max_tokens must be at least 1 unless echo or prompt_logprobs is given"
            raise field_validation_error("max_tokens", message)
        if len({self.prompt_logprobs, self._echoed_logprobs} - {None}) > 1:
            message = (
                "prompt_logprobs must equal logprobs, because echo applies logprobs to the prompt"
            )
            raise field_validation_error("prompt_logprobs", message)
        return self

    @model_validator(mode="after")
    def _has_bounded_answers(self) -> Self:
        num_prompts, per_prompt = len(self.prompt), self.num_candidates
        if num_prompts * per_prompt > MAX_ANSWERS:
            field = "n" if self.best_of is None else "best_of"
            message = (
                f"{num_prompts} prompts with {per_prompt} answers each are "
                f"{num_prompts * per_prompt} answers; a request may have at most {MAX_ANSWERS}"
            )
            raise field_validation_error(field, message)
        return self

    @property
    def _echoed_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def num_candidates(self) -> int:
        return self.best_of or self.num_choices

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def request(self) -> GenerationRequest:
        """Return what the body asks for. Raises ApiError (400)."""
        is_echoed = self.prompt_logprobs is None
        return GenerationRequest(
            Texts(
                self.prompt,
                bool(self.echo),
                is_prompt_only=self.max_tokens == 0,
                adds_special_tokens=self.add_special_tokens is not False,
            ),
            max_tokens=self.max_tokens,
            num_prompt_logprobs=self._echoed_logprobs if is_echoed else self.prompt_logprobs,
            prompt_logprobs_field="logprobs" if is_echoed else "prompt_logprobs",
            num_candidates=self.num_candidates,
            **self._request_fields(),
        )
