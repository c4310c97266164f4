"""The usage of a request: computed and cached prompt tokens, and the tokens of its answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from router.generation.record import GenerationRecord


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """Usage of one or more requests. ``prompt_tokens`` includes ``cached_tokens``."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def beyond(self, charged: "RequestUsage") -> "RequestUsage":
        """Return what is left of this usage after ``charged``, the usage of an earlier attempt."""
        prompt_tokens = max(self.prompt_tokens - charged.prompt_tokens, 0)
        return RequestUsage(
            max(self.requests - charged.requests, 0),
            prompt_tokens,
            min(self.cached_tokens, prompt_tokens),
            max(self.completion_tokens - charged.completion_tokens, 0),
        )

    def __add__(self, other: "RequestUsage") -> "RequestUsage":
        return RequestUsage(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
        )


def usage_of_generations(records: Sequence[GenerationRecord], per_prompt: int) -> RequestUsage:
    """Add up one request's usage, as in the ``usage`` of responses. Each prompt has ``per_prompt``
    consecutive records, one per answer."""
    prompts = list(counted_prompts(records, per_prompt))
    return RequestUsage(
        1,
        sum(prompt.num_prompt_tokens for prompt in prompts),
        sum(prompt.cached_tokens or 0 for prompt in prompts),
        sum(record.num_tokens for record in records),
    )


def counted_prompts(
    records: Sequence[GenerationRecord], per_prompt: int
) -> Iterator[GenerationRecord]:
    """Yield the records by which a request's prompts are counted, one for each prompt.

    A prompt counts once, however many answers it gets, and its cached tokens are the tokens that no
    answer had to compute: those of the answer with the fewest. A prompt counts if it was computed,
    or if its client disconnected after it was placed on a worker; otherwise it does not count.
    """
    for start in range(0, len(records), per_prompt):
        group = records[start : start + per_prompt]
        if any(map(_was_prefilled, group)):
            yield min(group, key=lambda record: record.cached_tokens or 0)


def _was_prefilled(record: GenerationRecord) -> bool:
    left = record.finish_reason == "cancelled" and bool(record.placements)
    return left or record.cached_tokens is not None
