"""What is measured: prompts that are read, and one step of answers that are written."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class BenchCase:
    """``context`` tokens of each of ``batch`` requests: prompts to read, or a token more each."""

    kind: Kind
    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.batch} × {self.context:,}"

    @property
    def num_tokens(self) -> int:
        """That are computed."""
        return self.batch * self.context if self.kind == "prefill" else self.batch

    @property
    def kv_tokens(self) -> int:
        """That the pool holds at its end."""
        return self.batch * self.context

    @property
    def num_pairs(self) -> int:
        """Of a token and one that it sees, itself among them."""
        if self.kind == "decode":
            return self.kv_tokens
        return self.batch * self.context * (self.context + 1) // 2


def bench_cases(
    prefill_batches: Sequence[int], decode_batches: Sequence[int], contexts: Sequence[int]
) -> Iterator[BenchCase]:
    """Prompts first; each by its context, then by its batch."""
    for context in contexts:
        for batch in prefill_batches:
            yield BenchCase("prefill", batch, context)
    for context in contexts:
        for batch in decode_batches:
            yield BenchCase("decode", batch, context)
