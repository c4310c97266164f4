"""Defines the benchmark cases: prefills of whole prompts, and single decode steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One benchmark case. It has ``batch`` requests with ``context`` tokens each, and either
    prefills all of these tokens or decodes one token per request."""

    kind: Kind
    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.batch} × {self.context:,}"

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are computed."""
        return self.batch * self.context if self.kind == "prefill" else self.batch

    @property
    def kv_tokens(self) -> int:
        """Number of tokens whose KV is in the pool after the case has run."""
        return self.batch * self.context

    @property
    def num_pairs(self) -> int:
        """Number of pairs of a computed token and a token to which it attends. Each computed token
        also attends to itself."""
        if self.kind == "decode":
            return self.kv_tokens
        return self.batch * self.context * (self.context + 1) // 2


def bench_cases(
    prefill_batches: Sequence[int], decode_batches: Sequence[int], contexts: Sequence[int]
) -> Iterator[BenchCase]:
    """Yield all cases, prefills before decodes. Within each kind, cases with the same context
    follow one another."""
    for context in contexts:
        for batch in prefill_batches:
            yield BenchCase("prefill", batch, context)
    for context in contexts:
        for batch in decode_batches:
            yield BenchCase("decode", batch, context)
