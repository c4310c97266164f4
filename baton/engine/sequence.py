"""The state of one request inside the engine: its tokens, its blocks and its phase."""

import math
from enum import StrEnum
from typing import Any

from baton.core.ids import BlockId, BlockKey, RequestId, TokenId
from baton.core.prefill_order import WaitingPrompt
from baton.core.request import FinishReason, RequestSpec, TokenLogprob
from baton.core.task import Task
from baton.engine.constraint import Constraint
from baton.engine.key_chain import BlockKeyChain
from baton.engine.kv_window import KvWindow
from baton.engine.plan import UNKNOWN_TOKEN, Row


class Phase(StrEnum):
    """The phase of a sequence. EXPORTED means that the KV of a prompt, or of a migrated answer, is
    computed and pinned until another worker has read it. RESERVED means that blocks are allocated
    and will be filled by a KV transfer."""

    WAITING = "waiting"
    RUNNING = "running"
    EXPORTED = "exported"
    RESERVED = "reserved"
    FINISHED = "finished"


PHASE_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    # admit | abort
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.FINISHED}),
    # preempt | prompt computed, migrate | answer complete, abort
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.EXPORTED, Phase.FINISHED}),
    # release, abort
    Phase.EXPORTED: frozenset({Phase.FINISHED}),
    # start | abort
    Phase.RESERVED: frozenset({Phase.RUNNING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class Sequence:
    """One request. Steps compute its tokens until ``num_computed_tokens`` has caught up with
    ``num_known_tokens``; then a token is sampled.

    ``block_ids`` is the block table, in the order of :class:`baton.engine.kv_window.KvWindow`. Its
    first ``num_sealed_blocks`` blocks are full and sealed under ``block_keys``, the others are
    FILLING. It is empty in phase WAITING. ``window`` says which of its blocks are read; the
    ``num_dropped_blocks`` others are NO_BLOCK. ``spare_block_ids`` will be added to the table while
    the prompt is computed: they were allocated at admission, so that a prompt never waits for
    blocks of groups of layers without a window. ``arrival_index`` orders the requests of an engine
    and is unique; a preempted request keeps its index. ``chain`` holds the keys of
    ``spec.token_ids``; the sequence owns and extends it."""

    __slots__ = (
        "_adapter_digest",
        "_attention_window",
        "_chain",
        "_needs_history",
        "_wants_prompt_logprobs",
        "arrival_index",
        "arrival_seconds",
        "awaits_migration",
        "block_ids",
        "constraint",
        "draft_state",
        "end_token_ids",
        "max_total_tokens",
        "num_adopted_tokens",
        "num_cached_at_admission",
        "num_computed_tokens",
        "num_dropped_blocks",
        "num_published_blocks",
        "num_sealed_blocks",
        "num_shared_blocks",
        "phase",
        "predicted_answer_tokens",
        "prompt_logprobs",
        "spare_block_ids",
        "spec",
        "task",
        "token_ids",
        "waiting_prompt",
        "window",
    )

    def __init__(
        self,
        spec: RequestSpec,
        task: Task,
        phase: Phase,
        *,
        chain: BlockKeyChain,
        arrival: int,
        arrival_seconds: float,
        max_model_tokens: int,
        window: KvWindow,
    ) -> None:
        self.spec = spec
        self.window = window
        self.task = task
        self.phase = phase
        self.arrival_index = arrival
        self.arrival_seconds = arrival_seconds
        self.token_ids: list[TokenId] = list(spec.token_ids)
        self.max_total_tokens = min(
            spec.num_prompt_tokens + spec.sampling.max_tokens, max_model_tokens
        )
        """Total length, prompt included, at which the answer ends."""
        self.block_ids: tuple[BlockId, ...] = ()
        self.spare_block_ids: tuple[BlockId, ...] = ()
        self.num_computed_tokens = 0
        self.num_sealed_blocks = 0
        self.num_dropped_blocks = 0
        self.num_adopted_tokens = 0
        """Prompt tokens that came from other requests' blocks after the first admission, instead of
        being computed."""
        self.num_published_blocks = 0
        """Number of leading blocks that were already reported in a SealedRun."""
        self.num_shared_blocks = 0
        """Number of cached blocks in the table that other requests already referenced."""
        self.predicted_answer_tokens = spec.sampling.max_tokens
        """Predicted length of the answer."""
        self.waiting_prompt = WaitingPrompt(
            arrival_seconds,
            objective_seconds=spec.ttft_slo_seconds or math.inf,
            tenant=spec.owner,
            priority=spec.priority,
        )
        """The estimates that the prefill order ranks this request by."""
        self.num_cached_at_admission: int | None = None
        """Number of tokens that were cached at the first admission; None before that."""
        self.constraint: Constraint | None = None
        """State of the answer's grammar, while the answer is generated on this worker."""
        self.end_token_ids: tuple[TokenId, ...] = ()
        """Tokens that would end the answer, which are not allowed before ``min_tokens``."""
        self.prompt_logprobs: list[TokenLogprob] = []
        """Logprobs of the prompt's tokens from the second token on, as far as they have been
        computed."""
        self.awaits_migration = False
        """Whether a migration is waiting until no step in flight computes this request."""
        self.draft_state: Any = None
        """What a :class:`baton.engine.speculation.draft_source.DraftSource` knows about this
        sequence."""
        self._chain = chain
        # Cached here because they are read for each token.
        self._adapter_digest = spec.adapter_digest
        self._attention_window = spec.attention_window
        self._needs_history = spec.sampling.needs_history
        self._wants_prompt_logprobs = spec.wants_prompt_logprobs and task is not Task.DECODE

    @property
    def request_id(self) -> RequestId:
        return self.spec.request_id

    @property
    def num_known_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_answer_tokens(self) -> int:
        """Number of the answer's tokens so far."""
        return len(self.token_ids) - self.spec.num_prompt_tokens

    @property
    def is_below_min_tokens(self) -> bool:
        """Whether the answer has fewer than ``min_tokens`` tokens, so that it may not end yet."""
        return self.num_answer_tokens < self.spec.sampling.min_tokens

    @property
    def leaves_after_next_token(self) -> bool:
        """Whether the request leaves the batch after its next token, whichever token that is."""
        return self.task is Task.PREFILL or len(self.token_ids) + 1 >= self.max_total_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that were never computed for this request."""
        return min(
            (self.num_cached_at_admission or 0) + self.num_adopted_tokens,
            self.spec.num_prompt_tokens,
        )

    @property
    def num_held_blocks(self) -> int:
        return len(self.block_ids) + len(self.spare_block_ids) - self.num_dropped_blocks

    @property
    def key_root(self) -> BlockKey:
        """The key before the first block: equal for requests whose KV may be shared."""
        return self._chain.root

    @property
    def block_keys(self) -> list[BlockKey]:
        """The keys of the full blocks of the known tokens, whether their KV is computed or not."""
        return self._chain.keys

    @property
    def computes_prompt_logprobs(self) -> bool:
        """Whether the prompt's logprobs are requested and this engine has not generated a token
        yet. If so, the whole prompt is computed, even if its KV is cached."""
        return self._wants_prompt_logprobs and len(self.token_ids) == len(self.spec.token_ids)

    @property
    def is_preemptable(self) -> bool:
        """Whether the sequence is running and may be preempted. A PREFILL request may not be
        preempted, because its KV may already be in transfer."""
        return self.phase is Phase.RUNNING and self.task is not Task.PREFILL

    def set_phase(self, phase: Phase) -> None:
        assert phase in PHASE_TRANSITIONS[self.phase], f"{self.request_id}: {self.phase} → {phase}"
        self.phase = phase

    def append_token(self, token_id: TokenId) -> None:
        """Append a token, whose KV is not computed yet."""
        self.token_ids.append(token_id)
        self._chain.extend(self.token_ids)

    def make_row(self, num_tokens: int) -> Row:
        """Return a row that computes the next ``num_tokens`` tokens."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + num_tokens
        sampling = self.spec.sampling
        sample = end == len(self.token_ids)
        with_history = sample and self._needs_history
        return Row(
            self.spec.request_id,
            tuple(self.token_ids[start:end]),
            start,
            self.block_ids,
            sample,
            sampling,
            tuple(self.token_ids) if with_history else (),
            self.spec.num_prompt_tokens if with_history else 0,
            self.constraint.mask if sample and self.constraint is not None else None,
            tuple(self.token_ids[start + 1 : end + 1]) if self.computes_prompt_logprobs else (),
            self.end_token_ids
            if sample and self.end_token_ids and self.is_below_min_tokens
            else (),
            self._adapter_digest,
            attention_window=self._attention_window,
        )

    def make_draft_row(self, drafts: tuple[TokenId, ...]) -> Row:
        """Return a row that computes the last known token and the drafts of the next ones."""
        row = self.make_row(1)
        assert row.sample, self.describe()
        row.token_ids += drafts
        row.num_drafts = len(drafts)
        if self.constraint is not None:
            row.accept = self.constraint.accept
        return row

    def make_next_row(self, before: Row, place: int) -> Row:
        """Return this sequence's row in the next step. The token that it computes is not known yet:
        it will be sampled by row ``before`` of the current step. ``place`` is the index of
        ``before`` in the current plan."""
        with_history = self._needs_history
        too_short = self.num_answer_tokens + 1 < self.spec.sampling.min_tokens
        return Row(
            self.spec.request_id,
            (UNKNOWN_TOKEN,),
            before.context_tokens,
            self.block_ids,
            True,
            self.spec.sampling,
            tuple(self.token_ids) if with_history else (),
            self.spec.num_prompt_tokens if with_history else 0,
            suppressed_token_ids=self.end_token_ids if too_short else (),
            adapter=self._adapter_digest,
            previous_row_index=place,
            attention_window=self._attention_window,
        )

    def finish_reason(self, eos_token_ids: frozenset[TokenId]) -> FinishReason | None:
        """Return why the answer ends with its last token, or None if it goes on."""
        token_id, sampling = self.token_ids[-1], self.spec.sampling
        ignored = sampling.ignore_eos and sampling.grammar is None
        if token_id in eos_token_ids and not ignored:
            return FinishReason.STOP
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_total_tokens else None

    def describe(self) -> str:
        return (
            f"{self.request_id} {self.task} {self.phase} arrival={self.arrival_index} "
            f"tokens={self.num_computed_tokens}/{self.num_known_tokens} "
            f"blocks={list(self.block_ids)}"
        )
