"""The frozen, torch-free plan of one engine step: what the scheduler decided, for the runner.

The step is three verbs: ``schedule() -> Plan``, ``run(plan) -> StepOutput``,
``apply(plan, output)``. There is one rule, "computed tokens catch up with known tokens":
a decode is a row with one token to compute, a prefill chunk a row with many.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams, TokenLogprob

UNKNOWN_TOKEN = TokenId(-1)
"""A token that the step before has yet to sample."""

ReadMask = Callable[[], bytes]
"""Tells which tokens may come next, as ``baton.engine.constraint`` has it. It is asked once the
logits are there, or on their way."""


@dataclass(slots=True)
class Row:
    """One request's share of a step: computes tokens [start, start + len(token_ids)).

    ``block_ids`` is the request's block table, long enough for the last of these tokens:
    token position p lives in block_ids[p // block_tokens] at p % block_tokens. If
    ``sample`` is set, the last token's logits choose the next token, whose position in the
    sequence is ``start + len(token_ids)`` (what the generator is keyed with). ``history`` are
    all known tokens and ``num_prompt_tokens`` how many of them are the prompt; they are
    given only when the sampling parameters need them (penalties), else empty and 0. ``mask`` is
    None where every token may be sampled. ``targets`` are the tokens of the prompt that follow each
    of ``token_ids``, where their logprobs were asked for: as many, or one less at its end.
    ``too_early`` are tokens that would end the answer, where it may not end yet.

    A row that ``follows`` one of the step before, by its place in that plan, has one token, which
    is UNKNOWN, and missing in ``history``, until :func:`fill_sampled_tokens`. Else nobody changes a
    row; it is not frozen only because there is one for each token of an answer, and a frozen one
    takes three times as long to make.
    """

    request_id: RequestId
    token_ids: tuple[TokenId, ...]
    start: int
    block_ids: tuple[BlockId, ...]
    sample: bool
    sampling: SamplingParams
    history: tuple[TokenId, ...] = ()
    num_prompt_tokens: int = 0
    mask: ReadMask | None = field(default=None, repr=False)
    targets: tuple[TokenId, ...] = ()
    too_early: tuple[TokenId, ...] = ()
    follows: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def context_tokens(self) -> int:
        """Tokens in the KV cache after this step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows in batch order: decodes first, then prefill chunks. Before any of them, ``copies`` are
    made: whole blocks, (from, to), for requests that share the beginning of a block."""

    step: int
    rows: tuple[Row, ...]
    copies: tuple[tuple[BlockId, BlockId], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True)
class SampledToken:
    """Nobody changes one: see :class:`Row`."""

    token_id: TokenId
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One entry per row of the plan; None for a row that does not sample, or whose mask allows
    nothing. ``scores`` are the logprobs of the rows' targets; empty when no row has any."""

    sampled: tuple[SampledToken | None, ...]
    scores: tuple[tuple[TokenLogprob, ...], ...] = ()


def fill_sampled_tokens(plan: Plan, before: StepOutput) -> None:
    """Tells the rows that follow others what the step ``before`` has sampled."""
    for row in plan.rows:
        if row.follows is None:
            continue
        sampled = before.sampled[row.follows]
        assert sampled is not None, f"{row.request_id} follows a row without a token"
        row.token_ids = (sampled.token_id,)
        if row.history:
            row.history += row.token_ids


class Runner(Protocol):
    """The device behind a small interface: :class:`ModelRunner` or a fake with no model.

    ``run`` computes KV for every token of the plan into the rows' blocks, samples where a
    row asks for it, and returns when both are visible to a reader of the pool's memory.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_tokens(self) -> int: ...

    def run(self, plan: Plan) -> StepOutput: ...
