"""The plan of one engine step, which the scheduler makes and the runner runs. This module does not
import torch.

A step has three parts: ``schedule() -> Plan``, ``run(plan) -> StepOutput``, ``apply(plan,
output)``. Prefill and decode follow one rule, "computed tokens catch up with known tokens": a
decode is a row with one token to compute, and a prefill chunk is a row with many.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.attention_window import AttentionWindow
from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams, TokenLogprob

UNKNOWN_TOKEN = TokenId(-1)
"""A placeholder for a token that the previous step has not sampled yet."""

TokenMaskFunction = Callable[[], bytes]
"""Returns the mask of the tokens that are allowed next, one bit per token id (``Constraint.mask``
in ``baton.engine.constraint``). It is called once the logits are computed, or launched on the
device."""

TokenAcceptFunction = Callable[[TokenId], None]
"""Advances the state of a row's grammar by a token (``Constraint.accept``)."""


@dataclass(slots=True)
class Row:
    """One request's part of a step, which computes tokens [start, start + len(token_ids)).

    ``block_ids`` is the request's block table, long enough for the last of these tokens: in group g
    of ``num_groups`` groups of layers, the token at position p is in
    block_ids[p // block_tokens * num_groups + g], at offset p % block_tokens. If ``sample`` is
    set, the next token is sampled from the last token's logits; its position in the sequence is
    ``start + len(token_ids)`` (which keys the random generator). ``history`` has all known tokens,
    and ``num_prompt_tokens`` says how many of them are the prompt; both are set only if the
    sampling parameters need them (for penalties). ``mask`` is None if every token may be sampled.
    ``prompt_logprob_targets`` are set if prompt logprobs are requested: they are the prompt tokens
    that follow each of ``token_ids``. At the end of the prompt there is one fewer, because no
    prompt token follows the last one. ``suppressed_token_ids`` are the tokens that would end the
    answer, if it may not end yet.

    ``adapter`` is the digest of the request's LoRA adapter, or empty. With an ``attention_window``,
    its tokens attend only to the tokens in it.

    The last ``num_drafts`` of ``token_ids`` are drafts: guesses of the next tokens, which the step
    verifies (``baton.engine.speculation.verification``). A row with drafts has one more token,
    which is known. ``history`` ends before the drafts. If the row also has a ``mask``, ``accept``
    advances it by a draft that is right.

    ``previous_row_index`` is the index of this request's row in the previous step's plan, if this
    row was planned before that step had sampled. Such a row has one token, which is UNKNOWN_TOKEN
    and missing in ``history`` until :func:`fill_sampled_tokens` fills it in. Apart from that, rows
    are never changed. They would be frozen if that didn't make creating them three times as slow: a
    row is created for each token of an answer."""

    request_id: RequestId
    token_ids: tuple[TokenId, ...]
    start: int
    block_ids: tuple[BlockId, ...]
    sample: bool
    sampling: SamplingParams
    history: tuple[TokenId, ...] = ()
    num_prompt_tokens: int = 0
    mask: TokenMaskFunction | None = field(default=None, repr=False)
    prompt_logprob_targets: tuple[TokenId, ...] = ()
    suppressed_token_ids: tuple[TokenId, ...] = ()
    adapter: bytes = b""
    previous_row_index: int | None = None
    num_drafts: int = 0
    accept: TokenAcceptFunction | None = field(default=None, repr=False)
    attention_window: AttentionWindow | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def context_tokens(self) -> int:
        """Number of the request's tokens that are in the KV cache after this step, with drafts."""
        return self.start + len(self.token_ids)

    @property
    def attended_tokens(self) -> int:
        """Number of tokens that the row's last token attends to."""
        if self.attention_window is None:
            return self.context_tokens
        return min(self.context_tokens, self.attention_window.max_attended)

    def with_accepted(self, num_drafts: int) -> "Row":
        """Return a row without drafts that samples the token after the first ``num_drafts`` drafts,
        assuming that these are right."""
        end = len(self.token_ids) - self.num_drafts + num_drafts
        accepted = self.token_ids[end - num_drafts : end]
        return Row(
            self.request_id,
            self.token_ids[:end],
            self.start,
            self.block_ids,
            self.sample,
            self.sampling,
            self.history + accepted if self.history else (),
            self.num_prompt_tokens,
            self.mask,
            self.prompt_logprob_targets,
            self.suppressed_token_ids,
            self.adapter,
            attention_window=self.attention_window,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of a step in batch order: decodes first, then prefill chunks. ``copies`` are pairs
    (from, to) of blocks. Each pair's first block is copied to the second before any row is
    computed; this serves requests that share only the beginning of a block."""

    step: int
    rows: tuple[Row, ...]
    copies: tuple[tuple[BlockId, BlockId], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True)
class SampledToken:
    """A sampled token, with its logprobs if they are requested. It is never changed but, like
    :class:`Row`, it is not frozen, because that would make creating it slower."""

    token_id: TokenId
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a step. ``sampled`` has one entry per row of the plan: the sampled token, or
    None if the row does not sample or its mask allows no token. ``prompt_logprobs`` has the
    logprobs of each row's ``prompt_logprob_targets``; it is empty if no row has any.

    ``following`` has the tokens that rows sampled after ``sampled``, by the row's index: one for
    each draft that was right, which is the token after that draft, or the next draft."""

    sampled: tuple[SampledToken | None, ...]
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    following: Mapping[int, tuple[SampledToken, ...]] = field(default_factory=dict)


def fill_sampled_tokens(plan: Plan, before: StepOutput) -> None:
    """Replace the unknown tokens of ``plan`` with the tokens that the previous step has sampled.
    ``before`` is the output of that step."""
    for row in plan.rows:
        if row.previous_row_index is None:
            continue
        sampled = before.sampled[row.previous_row_index]
        assert sampled is not None, f"{row.request_id} follows a row without a token"
        row.token_ids = (sampled.token_id,)
        if row.history:
            row.history += row.token_ids


class Runner(Protocol):
    """Runs plans on a device: :class:`ModelRunner`, or a fake without a model.

    ``run`` computes KV for every token of the plan into the rows' blocks, samples a token for each
    row with ``sample``, and returns once the KV is visible to readers of the pool's memory.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_tokens(self) -> int: ...

    @property
    def num_groups(self) -> int:
        """Number of groups of layers, each of which has its own blocks."""
        ...

    def run(self, plan: Plan) -> StepOutput: ...
