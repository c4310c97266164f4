"""Decides what the next step computes: decodes first, then prefill chunks in ranked order."""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

from baton.core.ids import BlockId, BlockKey
from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.kv_window import NO_BLOCK
from baton.engine.memory_projection import memory_suffices
from baton.engine.next_step import ContinuingSequence, continuing_sequences, next_position, next_row
from baton.engine.partial_block import find_partial_block
from baton.engine.plan import Plan, Row
from baton.engine.prefill_budget import MaxPrefillTokens, unlimited_tokens
from baton.engine.prefill_ranking import PredictPrefillSeconds, PrefillRanking, unknown_seconds
from baton.engine.sequence import Phase, Sequence
from baton.engine.sequence_queue import SequenceQueue
from baton.engine.speculation.speculator import Speculator
from baton.engine.table_changes import NewTable, drop_before_window, extend_table

_RETRY_EVERY_STEP = -1
"""A value of ``Scheduler._allocatable_when_blocked`` that is below any number of allocatable
blocks, so that admission is tried again in each step."""


class Scheduler:
    """Keeps every live sequence in the queue of its phase, and manages its blocks.

    A sequence gets the blocks of all its known tokens when it is admitted, and one block at a time
    as its answer grows. So only a growing answer can lack a block. In that case, the preemptable
    sequence of the lowest priority that arrived last goes back to the waiting queue (perhaps the
    growing one itself), so the earliest sequence of the highest priority always advances. A step's
    token budget goes to prompts in ranked order, both those that are partly computed and those that
    wait. With a preemptive order, a prompt may pause between two chunks; it keeps its blocks
    meanwhile. Waiting prompts are admitted strictly in ranked order. If memory does not suffice for
    a prompt, all prompts behind it wait, too, so that a long prompt isn't starved by short ones.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: EngineConfig,
        prefill_seconds: PredictPrefillSeconds = unknown_seconds,
        max_prefill_tokens: MaxPrefillTokens = unlimited_tokens,
        prompt_slowdown: Callable[[int, int], float] = lambda num_answers, context_tokens: 1.0,
        speculator: Speculator | None = None,
    ) -> None:
        self.queues: dict[Phase, SequenceQueue] = {
            phase: SequenceQueue() for phase in Phase if phase is not Phase.FINISHED
        }
        self.num_preemptions = 0
        self.num_pauses = 0
        self.num_steps = 0
        self.admitted: list[Sequence] = []
        """Sequences that the last plan admitted for the first time."""
        self.preempted: list[Sequence] = []
        """Sequences that the last plan preempted."""
        self._pool = pool
        self._config = config
        # Cached here because they are read for each token.
        self._block_tokens, self._num_groups = config.block_tokens, config.num_groups
        self._max_prefill_tokens = max_prefill_tokens
        self._prompt_slowdown = prompt_slowdown
        self._speculator = speculator
        self._prefill_ranking = PrefillRanking(pool, config, prefill_seconds)
        self._waiting = self.queues[Phase.WAITING]
        self._running = self.queues[Phase.RUNNING]
        self._reserved = self.queues[Phase.RESERVED]
        # Number of allocatable blocks when there were too few for the first sequence in the queue;
        # _RETRY_EVERY_STEP if it is blocked for another reason; None if nothing blocks it.
        self._allocatable_when_blocked: int | None = None
        # Whether the last sequence that got blocks was a reservation: reservations and a blocked
        # queue take turns.
        self._admitted_reservation_last = False
        # Whether nothing can be scheduled until a sequence or a block changes its state.
        self._stalled = False
        # Keys of the blocks that this step's prefill chunks fill.
        self._keys_in_step: set[BlockKey] = set()
        # Pairs (from, to) of blocks to be copied before this step's rows are computed.
        self._pending_copies: list[tuple[BlockId, BlockId]] = []
        # Prompts that got a chunk in the last step.
        self._chunked_last_step: set[Sequence] = set()

    # Adding and removing sequences, and their phases

    @property
    def has_work(self) -> bool:
        return len(self._running) > 0 or (len(self._waiting) > 0 and not self._stalled)

    @property
    def num_free_slots(self) -> int:
        """Number of sequences that may still join the batch."""
        return self._config.max_batch_requests - len(self._running) - len(self._reserved)

    def retry_admission(self) -> None:
        """Let the next step try to admit waiting sequences again. Call this after a change that may
        make it possible: a sequence was added or changed its phase, or blocks were freed."""
        self._stalled = False

    def enqueue(self, sequence: Sequence) -> None:
        assert sequence.phase is Phase.WAITING
        self._waiting.add(sequence)
        self._prefill_ranking.add_waiting(sequence)
        if self._allocatable_when_blocked is not None:
            self._allocatable_when_blocked = (
                _RETRY_EVERY_STEP  # it may rank above those that don't fit
            )
        self.retry_admission()

    def reserve(self, sequence: Sequence) -> bool:
        """Give a RESERVED sequence a batch slot and blocks for its tokens. Return False if there is
        no free slot, if :meth:`_allocate_table` returns False, or if it is the waiting queue's turn
        to get blocks."""
        assert sequence.phase is Phase.RESERVED
        queue_goes_first = (
            self._allocatable_when_blocked is not None and self._admitted_reservation_last
        )
        if self.num_free_slots <= 0 or queue_goes_first:
            return False
        config, num_known = self._config, sequence.num_known_tokens
        num_full = num_known // self._block_tokens * self._num_groups
        cached = self._pool.find_cached(sequence.block_keys, num_full, sequence.window)
        end, first_span = config.num_blocks_for(num_known), sequence.window.first_span(num_known)
        if not self._allocate_table(sequence, cached, end, first_span):
            return False
        self._reserved.add(sequence)
        self._admitted_reservation_last = True
        return True

    def change_phase(self, sequence: Sequence, phase: Phase) -> None:
        """Change the phase of a sequence and move it to that phase's queue. Its blocks are not
        touched."""
        self.queues[sequence.phase].remove(sequence)
        if sequence.phase is Phase.WAITING:
            self._prefill_ranking.remove_waiting(sequence)
            self._allocatable_when_blocked = None
        sequence.set_phase(phase)
        if phase is not Phase.FINISHED:
            self.queues[phase].add(sequence)
        if phase is Phase.WAITING:
            self._prefill_ranking.add_waiting(sequence)
        self.retry_admission()

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence in any phase and release its blocks."""
        self.remove_keeping_blocks(sequence)
        self.free_blocks(sequence)

    def remove_keeping_blocks(self, sequence: Sequence) -> None:
        """Remove a sequence but keep its blocks, because a step in flight still writes to them.
        Call :meth:`free_blocks` afterwards."""
        self.change_phase(sequence, Phase.FINISHED)

    def free_blocks(self, sequence: Sequence) -> None:
        """Release the blocks of a finished sequence. Call this once no step writes to them any
        more."""
        self._release_blocks(sequence)
        self.retry_admission()

    def can_allocate_new(self, cached: Collection[BlockId], num_new: int) -> bool:
        """Whether ``num_new`` blocks can be allocated in addition to the ``cached`` ones. While
        sequences are running, the watermark must stay free for them."""
        spare = self._config.watermark_blocks if self._running else 0
        return self._pool.can_extend(cached, num_new + spare)

    def seal_computed(self, sequence: Sequence) -> None:
        """Seal the blocks that are full of computed tokens: give each one its key. Release those
        that no later token reads."""
        num_full = sequence.num_computed_tokens // self._block_tokens * self._num_groups
        if num_full > sequence.num_sealed_blocks:
            self._seal_until(sequence, num_full)
        self._drop_before_window(sequence)

    def _seal_until(self, sequence: Sequence, num_full: int) -> None:
        keys = sequence.block_keys
        for index in range(sequence.num_sealed_blocks, num_full):
            if sequence.block_ids[index] != NO_BLOCK:
                self._pool.seal(sequence.block_ids[index], keys[index])
        sequence.num_sealed_blocks = num_full

    # One step

    def schedule(self, now_seconds: float) -> Plan:
        """Return the next step's plan, which is empty if nothing can be computed. The runner must
        run the plan."""
        self.admitted.clear()
        self.preempted.clear()
        preempted = self._allocate_or_preempt()
        decoding = [
            each
            for each in self._running
            if each.num_uncomputed_tokens == 1
            and not self._lacks_block(each, each.num_computed_tokens)
        ]
        rows = self._decode_rows(decoding)
        chunks = self._chunk_rows(rows, preempted, now_seconds)
        if chunks:  # without drafts, since products limit the step rather than memory
            rows += chunks
        elif self._speculator is not None and decoding:
            rows = self._speculator.add_drafts(decoding, rows)
        self._stalled = not rows and not preempted
        rows.sort(key=_is_chunk)
        self.num_steps += 1
        copies, self._pending_copies = tuple(self._pending_copies), []
        return Plan(self.num_steps, tuple(rows), copies)

    def schedule_ahead(self, plan: Plan, sequences: Seq[Sequence]) -> Plan | None:
        """Plan the step after ``plan`` while ``plan`` is still being computed for ``sequences``,
        before its sampled tokens are known.

        Return None if :meth:`schedule` might do more than continue decodes. In that case, call
        :meth:`schedule` once the tokens are known.
        """
        continuing = continuing_sequences(self._running, plan, sequences)
        if not continuing or not self._is_admission_impossible(len(continuing)):
            return None
        if self._speculator is not None and self._speculator.wants_to_draft(
            [each for each, _ in continuing]
        ):
            return None
        if not self._allocate_next_blocks(continuing, plan):
            return None
        self._prefill_ranking.charge_decodes([sequence for sequence, _ in continuing])
        self._chunked_last_step.clear()
        self.num_steps += 1
        return Plan(self.num_steps, tuple(next_row(each, plan) for each in continuing))

    def _is_admission_impossible(self, num_continuing: int) -> bool:
        """Whether no waiting sequence could be admitted while ``num_continuing`` sequences run."""
        if not self._waiting:
            return True
        if num_continuing < len(self._running):
            return False
        return self.num_free_slots <= 0 or self._is_blocked

    def _allocate_next_blocks(self, continuing: list[ContinuingSequence], plan: Plan) -> bool:
        """Make sure that each sequence has a block for its next token. If that would need a
        preemption, allocate nothing and return False."""
        lacking = [
            each[0] for each in continuing if self._lacks_block(each[0], next_position(each, plan))
        ]
        if not self._pool.can_allocate(len(lacking) * self._config.num_groups):
            return False
        for sequence in lacking:
            extend_table(sequence, self._pool, self._config)
        return True

    def _allocate_or_preempt(self) -> bool:
        """Make sure that each running sequence has a block for its next token, and preempt
        sequences if blocks are lacking. Return whether any sequence was preempted."""
        preempted = False
        for sequence in list(self._running):
            while sequence.phase is Phase.RUNNING and self._lacks_block(
                sequence, sequence.num_computed_tokens
            ):
                if extend_table(sequence, self._pool, self._config):
                    continue
                if self._preempt_latest():
                    preempted = True
                else:
                    break  # a prompt whose dropped blocks are shared waits until one is released
        return preempted

    def _lacks_block(self, sequence: Sequence, position: int) -> bool:
        return position >= len(sequence.block_ids) // self._num_groups * self._block_tokens

    def _preempt_latest(self) -> bool:
        """Preempt a sequence. Return False if there is none that can be preempted."""
        victim = self._running.latest_preemptable()
        if victim is None:
            return False
        victim.waiting_prompt.was_preempted = True
        self._release_blocks(victim)
        self.change_phase(victim, Phase.WAITING)
        self.preempted.append(victim)
        self.num_preemptions += 1
        return True

    def _decode_rows(self, decoding: list[Sequence]) -> list[Row]:
        self._prefill_ranking.charge_decodes(decoding)
        return [each.make_row(1) for each in decoding]

    def charge_accepted(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge a sequence's tenant for drafts that became part of the answer."""
        self._prefill_ranking.charge_answer(sequence, num_tokens)

    def _chunk_rows(self, decodes: list[Row], preempted: bool, now_seconds: float) -> list[Row]:
        """Distribute the rest of the token budget to prompts in ranked order, and admit waiting
        prompts until one can't be admitted. Return the rows of the chunks."""
        computing = [each for each in self._running if each.num_uncomputed_tokens > 1]
        admitting = self._may_admit(preempted)
        waiting = self._waiting if admitting else ()
        self._keys_in_step.clear()
        budget = self._config.max_batched_tokens - len(decodes)
        if computing or waiting:
            budget = self._limit_prefill_tokens(decodes, computing, budget)
        rows: list[Row] = []
        chunked: set[Sequence] = set()
        for sequence, limit in self._prefill_ranking.allocate(
            computing, waiting, budget, now_seconds
        ):
            if budget == 0:
                break
            if sequence.phase is Phase.RUNNING:
                self._adopt_cached_blocks(sequence)
                sequence.num_adopted_tokens += self._copy_partial_block(sequence)
            else:
                admitting = admitting and self._admit_one(sequence)
                if not admitting:
                    continue
            row = self._chunk_row(sequence, min(limit, budget))
            if row is not None:
                rows.append(row)
                chunked.add(sequence)
                budget -= row.num_tokens
                self._prefill_ranking.charge_chunk(sequence, row.num_tokens)
        self._count_pauses(computing, chunked)
        return rows

    def _limit_prefill_tokens(
        self, decodes: list[Row], computing: list[Sequence], budget: int
    ) -> int:
        """Return how much of ``budget`` prefill may use in a step with these decodes."""
        context_tokens = sum(row.attended_tokens for row in decodes)
        self._prefill_ranking.prompt_slowdown = self._prompt_slowdown(len(decodes), context_tokens)
        if not decodes:
            return budget
        deepest = max((each.num_computed_tokens for each in computing), default=0)
        return self._max_prefill_tokens(len(decodes), context_tokens, deepest, budget)

    def _count_pauses(self, computing: list[Sequence], chunked: set[Sequence]) -> None:
        """Count the prompts that got a chunk in the last step but not in this step, while other
        prompts got one."""
        self.num_pauses += sum(
            each in self._chunked_last_step
            and each not in chunked
            and each.num_uncomputed_tokens > 1
            for each in computing
        )
        self._chunked_last_step = chunked

    def _adopt_cached_blocks(self, sequence: Sequence) -> None:
        """Replace the sequence's next blocks with cached ones that someone else (an import, or a
        request with the same prompt) has sealed in the meantime. The last known token is always
        computed."""
        if sequence.computes_prompt_logprobs:
            return
        config, first = self._config, sequence.num_sealed_blocks
        limit = (sequence.num_known_tokens - 1) // config.block_tokens * config.num_groups
        limit = min(limit, len(sequence.block_ids))
        found = self._pool.find_cached_run(sequence.block_keys[first:limit])
        del found[len(found) // config.num_groups * config.num_groups :]
        if not found:
            return
        own = sequence.block_ids[first : first + len(found)]
        sequence.num_shared_blocks += self._pool.count_referenced(found)
        self._pool.reference(found)
        rest = sequence.block_ids[first + len(found) :]
        sequence.block_ids = (*sequence.block_ids[:first], *found, *rest)
        self._pool.release(own)
        sequence.num_sealed_blocks += len(found)
        end = config.num_tokens_in(sequence.num_sealed_blocks)
        sequence.num_adopted_tokens += end - sequence.num_computed_tokens
        sequence.num_computed_tokens = end
        self._drop_before_window(sequence)

    def _copy_partial_block(self, sequence: Sequence) -> int:
        """Copy on write: if another request has partly filled a block with the same tokens after
        the same prefix, copy that block instead of computing its tokens.

        Return how many tokens need not be computed. The last known token is always computed, and so
        is the last token of a block, because the sequence that fills a block must also seal it.
        """
        config, first = self._config, sequence.num_sealed_blocks
        start = config.num_tokens_in(first)
        end = min(start + config.block_tokens, sequence.num_known_tokens) - 1
        wanted = sequence.token_ids[start:end]
        if sequence.num_computed_tokens != start or not wanted or sequence.computes_prompt_logprobs:
            return 0
        if self._lacks_block(sequence, start):
            return 0
        others = (*self._running, *self.queues[Phase.EXPORTED])
        best, length = find_partial_block(sequence, wanted, others, config)
        if best is None:
            return 0
        for index in range(first, first + config.num_groups):
            self._pending_copies.append((best.block_ids[index], sequence.block_ids[index]))
        sequence.num_computed_tokens += length
        return length

    def _chunk_row(self, sequence: Sequence, budget: int) -> Row | None:
        """Return the sequence's next prefill chunk, or None if another sequence computes the same
        next block in this step. In that case, the sequence adopts the block in a later step."""
        first = sequence.num_sealed_blocks
        is_coming = (
            sequence.block_keys[first : first + 1]
            and sequence.block_keys[first] in self._keys_in_step
        )
        if is_coming and not sequence.computes_prompt_logprobs:
            return None
        room = self._config.num_tokens_in(len(sequence.block_ids)) - sequence.num_computed_tokens
        if room <= 0:
            return None
        row = sequence.make_row(
            min(sequence.num_uncomputed_tokens, self._config.max_chunk_tokens, budget, room)
        )
        num_full = row.context_tokens // self._config.block_tokens * self._config.num_groups
        self._keys_in_step.update(sequence.block_keys[first:num_full])
        return row

    # Admission

    def _may_admit(self, preempted: bool) -> bool:
        """Whether any waiting sequence may be admitted in this step. False if none waits, if the
        first one still lacks memory, if no slot is free, or if a sequence was just preempted."""
        if not self._waiting:
            self._allocatable_when_blocked = None
            return False
        if preempted:
            self._allocatable_when_blocked = self._pool.num_allocatable
            return False
        if self.num_free_slots <= 0:
            self._allocatable_when_blocked = _RETRY_EVERY_STEP
            return False
        return not (self._is_blocked and self._running)

    @property
    def _is_blocked(self) -> bool:
        """Whether the first sequence in the queue could not be admitted for lack of blocks, and no
        more blocks are allocatable now than at that time."""
        return (
            self._allocatable_when_blocked is not None
            and self._pool.num_allocatable <= self._allocatable_when_blocked
        )

    def _admit_one(self, sequence: Sequence) -> bool:
        """Admit a sequence (WAITING → RUNNING) if a slot and the blocks are available. Return
        whether it was admitted. The last known token is always computed, and never into a shared
        block, so a fully cached prompt recomputes its last block."""
        if self.num_free_slots <= 0:
            self._allocatable_when_blocked = _RETRY_EVERY_STEP
            return False
        config = self._config
        limit = (sequence.num_known_tokens - 1) // config.block_tokens * config.num_groups
        cached = self._pool.find_cached(
            sequence.block_keys, 0 if sequence.computes_prompt_logprobs else limit, sequence.window
        )
        end = config.table_end(sequence.num_known_tokens, len(cached), sequence.window)
        if not self._allocate_table(sequence, cached, end):
            return False
        sequence.num_computed_tokens = config.num_tokens_in(sequence.num_sealed_blocks)
        self._copy_partial_block(sequence)
        if sequence.num_cached_at_admission is None:
            sequence.num_cached_at_admission = sequence.num_computed_tokens
            self.admitted.append(sequence)
        self.change_phase(sequence, Phase.RUNNING)
        self._admitted_reservation_last = False
        return True

    def _allocate_table(
        self, sequence: Sequence, cached: list[BlockId], end: int, first_span: int = 0
    ) -> bool:
        """Give the sequence a block table (see :class:`NewTable`). Return False if there are too
        few blocks now, or (with ``forecasts_memory``) if memory is predicted to run short before
        all running answers have ended. If the sequence is WAITING, ``_allocatable_when_blocked``
        then says when to try again."""
        table = NewTable.of(sequence, cached, end, first_span, self._config)
        if not self.can_allocate_new(table.cached, table.num_new):
            self._record_blocked(sequence, self._pool.num_allocatable)
            return False
        sequence.num_shared_blocks = self._pool.count_referenced(table.cached)
        if self._config.forecasts_memory and not sequence.waiting_prompt.was_preempted:
            others = (*self._running, *self._reserved)
            if not memory_suffices(self._pool, self._config, others, sequence):
                # The prediction may change although no block is freed.
                self._record_blocked(sequence, _RETRY_EVERY_STEP)
                return False
        self._pool.reference(table.cached)
        table.give(sequence, self._pool.allocate(table.num_new))
        return True

    def _drop_before_window(self, sequence: Sequence) -> None:
        if drop_before_window(sequence, self._pool, self._config):
            self.retry_admission()

    def _record_blocked(self, sequence: Sequence, blocked_at: int) -> None:
        """Record that the queue is blocked until more than ``blocked_at`` blocks are allocatable. A
        RESERVED sequence does not block the queue; the caller of :meth:`reserve` tries again."""
        if sequence.phase is Phase.WAITING:
            self._allocatable_when_blocked = blocked_at

    def _release_blocks(self, sequence: Sequence) -> None:
        self._pool.release((*sequence.block_ids, *sequence.spare_block_ids))
        sequence.block_ids = sequence.spare_block_ids = ()
        sequence.num_shared_blocks = sequence.num_dropped_blocks = 0
        sequence.num_computed_tokens = sequence.num_sealed_blocks = 0


def _is_chunk(row: Row) -> bool:
    return len(row.token_ids) > 1
