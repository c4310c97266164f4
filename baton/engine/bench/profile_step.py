"""The steps that are measured for a table of costs: prompts, answers, and both together."""

from collections.abc import Iterator
from dataclasses import dataclass

from baton.errors import Invalid

MAX_CONTEXT = 4096
MAX_BATCH = 16
MIN_CONTEXT = 64
"""The shortest context with which attention and products can be told apart."""

CONTEXTS_IN_POOL = 20
"""The pool must hold as many of the longest contexts: those of a step with MAX_BATCH of them, a
prompt, and partly filled blocks."""

PROMPT_SHARES = (1 / 32, 1 / 8, 1 / 4, 1 / 2, 1)
"""The sizes of prompts, as shares of a chunk."""


@dataclass(frozen=True, slots=True)
class ProfileStep:
    """A step that computes ``new_tokens`` tokens of a prompt after ``cached_tokens`` others (0 and
    0: no prompt), and the next token of each of ``batch`` answers. The contexts of the answers
    have ``context`` tokens each, including the next one. ``held_out`` steps are not fitted, but
    predicted."""

    new_tokens: int = 0
    cached_tokens: int = 0
    batch: int = 0
    context: int = 0
    held_out: bool = False

    @property
    def kind(self) -> str:
        if not self.batch:
            return "prefill"
        return "mixed" if self.new_tokens else "decode"

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV is in the pool after the step."""
        return self.cached_tokens + self.new_tokens + self.context_tokens

    @property
    def context_tokens(self) -> int:
        """The sum of the answers' contexts."""
        return self.batch * self.context

    def __str__(self) -> str:
        prompt = f"{self.new_tokens:,} after {self.cached_tokens:,}" if self.new_tokens else ""
        answers = f"{self.batch} × {self.context:,}" if self.batch else ""
        parts = " and ".join(part for part in (prompt, answers) if part)
        return f"{self.kind} of {parts}"

    def row(self, seconds: float) -> dict[str, float]:
        """Return the row of the table for ``baton simulate --costs``."""
        prompt = {"new_tokens": self.new_tokens, "cached_tokens": self.cached_tokens}
        answers = {"batch": self.batch, "context_tokens": self.context_tokens}
        parts = (prompt if self.new_tokens else {}) | (answers if self.batch else {})
        return {**parts, "seconds": seconds}


def profile_steps(chunk_tokens: int, max_positions: int, capacity_tokens: int) -> list[ProfileStep]:
    """Return the steps to measure, for steps of at most ``chunk_tokens`` tokens of a prompt, and
    contexts for which the model has positions and the pool of ``capacity_tokens`` has memory. Sizes
    and contexts vary independently, so that what depends on the number of tokens, of requests, of
    pairs of tokens and of tokens of context is told apart. Raises Invalid for too few positions or
    too little memory."""
    context = min(max_positions, MAX_CONTEXT, capacity_tokens // CONTEXTS_IN_POOL)
    context -= context % MIN_CONTEXT
    if context < MIN_CONTEXT:
        raise Invalid(
            f"the model has {max_positions:,} positions and the pool {capacity_tokens:,} tokens; a "
            f"profile needs at least {MIN_CONTEXT} and {MIN_CONTEXT * CONTEXTS_IN_POOL:,}"
        )
    chunk = min(chunk_tokens, context // 2)
    return [
        *_prefills(chunk, context),
        *_decodes(context),
        *_mixed(chunk, context),
        *_held_out(chunk, context),
    ]


def _prefills(chunk: int, context: int) -> Iterator[ProfileStep]:
    sizes = dict.fromkeys(max(int(chunk * share), 1) for share in PROMPT_SHARES)
    for cached in (0, context - chunk):
        for new in sizes:
            yield ProfileStep(new, cached)


def _decodes(context: int) -> Iterator[ProfileStep]:
    for each in (context // 16, context // 4, context):
        for batch in (1, MAX_BATCH // 4, MAX_BATCH):
            yield ProfileStep(batch=batch, context=each)


def _mixed(chunk: int, context: int) -> Iterator[ProfileStep]:
    for new in (chunk // 4, chunk):
        for batch in (MAX_BATCH // 4, MAX_BATCH):
            yield ProfileStep(new, 0, batch, context // 4)
    yield ProfileStep(chunk // 4, context // 2, MAX_BATCH, context)


def _held_out(chunk: int, context: int) -> Iterator[ProfileStep]:
    """Yield one step of each kind between the measured ones, and one with twice the largest batch,
    beyond them."""
    yield ProfileStep(chunk * 3 // 8, context // 4, held_out=True)
    yield ProfileStep(batch=MAX_BATCH // 2, context=context // 2, held_out=True)
    yield ProfileStep(chunk // 2, context // 8, MAX_BATCH // 2, context // 8, held_out=True)
    yield ProfileStep(batch=2 * MAX_BATCH, context=context // 2, held_out=True)
