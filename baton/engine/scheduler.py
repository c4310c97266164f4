"""Decides what the next step computes: decodes first, then chunks of prompts, in turn."""

from collections.abc import Collection
from collections.abc import Sequence as Seq

from baton.core.ids import BlockId, BlockKey, TokenId
from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.memory_projection import memory_suffices
from baton.engine.next_step import ContinuingSequence, continuing_sequences, next_position, next_row
from baton.engine.plan import Plan, Row
from baton.engine.prefill_budget import MaxPrefillTokens, unlimited_tokens
from baton.engine.prefill_ranking import PrefillRanking, PrefillSeconds, unknown_seconds
from baton.engine.sequence import Phase, Sequence
from baton.engine.sequence_queue import SequenceQueue

_ASK_AGAIN = -1


class Scheduler:
    """Keeps every live sequence in the lineup of its phase, and its blocks with it.

    A sequence gets the blocks of all its known tokens when it is admitted, and one block at a
    time as its answer grows. So only a growing answer can lack a block, and then the
    latest-arrived preemptable sequence goes back to the queue (perhaps itself): the earliest
    always advances. A step's budget goes to prompts in turn, those that are being computed and
    those that wait; with a preemptive order, a prompt pauses between two chunks and keeps its
    blocks. Newcomers are admitted strictly in turn; the first that doesn't fit blocks those
    behind it, so that a long prompt isn't starved by short ones.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: EngineConfig,
        prefill_seconds: PrefillSeconds = unknown_seconds,
        prompt_tokens: MaxPrefillTokens = unlimited_tokens,
    ) -> None:
        self.lineups: dict[Phase, SequenceQueue] = {
            phase: SequenceQueue() for phase in Phase if phase is not Phase.FINISHED
        }
        self.num_preemptions = 0
        self.num_pauses = 0
        self.num_steps = 0
        self.admitted: list[Sequence] = []
        """For the first time, by the last step's plan."""
        self.preempted: list[Sequence] = []
        """By the last step's plan."""
        self._pool = pool
        self._config = config
        self._prompt_tokens = prompt_tokens
        self._turns = PrefillRanking(pool, config, prefill_seconds)
        self._waiting = self.lineups[Phase.WAITING]
        self._running = self.lineups[Phase.RUNNING]
        self._reserved = self.lineups[Phase.RESERVED]
        # Allocatable blocks when the first in the queue was found not to fit; _ASK_AGAIN if
        # it was for another reason than blocks; None when the queue isn't blocked.
        self._blocked_at: int | None = None
        # A blocked queue and reservations take turns.
        self._reserved_last = False
        # Nothing can be scheduled until something changes.
        self._stalled = False
        # Keys of the blocks that this step's chunks fill.
        self._coming: set[BlockKey] = set()
        # Blocks to be copied before this step's rows, (from, to).
        self._copies: list[tuple[BlockId, BlockId]] = []
        # Prompts that got a chunk in the last step.
        self._chunked: set[Sequence] = set()

    # Sequences come, change phase and go

    @property
    def has_work(self) -> bool:
        return len(self._running) > 0 or (len(self._waiting) > 0 and not self._stalled)

    @property
    def num_slots(self) -> int:
        """How many more may join the batch."""
        return self._config.running_limit - len(self._running) - len(self._reserved)

    def wake(self) -> None:
        """Something changed outside of a step that may let a waiting sequence in."""
        self._stalled = False

    def enqueue(self, sequence: Sequence) -> None:
        assert sequence.phase is Phase.WAITING
        self._waiting.add(sequence)
        self._turns.join(sequence)
        if self._blocked_at is not None:
            self._blocked_at = _ASK_AGAIN  # its turn may come before those that don't fit
        self.wake()

    def reserve(self, sequence: Sequence) -> bool:
        """Gives a RESERVED sequence the blocks of its tokens and a slot, or no."""
        assert sequence.phase is Phase.RESERVED
        queue_goes_first = self._blocked_at is not None and self._reserved_last
        if self.num_slots <= 0 or queue_goes_first:
            return False
        full_blocks = sequence.num_known // self._config.block_tokens
        if not self._take_blocks(sequence, full_blocks):
            return False
        self._reserved.add(sequence)
        self._reserved_last = True
        return True

    def transfer(self, sequence: Sequence, phase: Phase) -> None:
        """Moves a sequence to another lineup. Its blocks stay what they are."""
        self.lineups[sequence.phase].remove(sequence)
        if sequence.phase is Phase.WAITING:
            self._turns.leave(sequence)
            self._blocked_at = None
        sequence.move(phase)
        if phase is not Phase.FINISHED:
            self.lineups[phase].add(sequence)
        if phase is Phase.WAITING:
            self._turns.join(sequence)
        self.wake()

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence, in whatever phase, and releases its blocks."""
        self.leave(sequence)
        self.free(sequence)

    def leave(self, sequence: Sequence) -> None:
        """:meth:`finish`, for one that a step is being computed for: :meth:`free` comes later."""
        self.transfer(sequence, Phase.FINISHED)

    def free(self, sequence: Sequence) -> None:
        """Nobody writes to the blocks of a finished sequence any more."""
        self._release_blocks(sequence)
        self.wake()

    def fits(self, cached: Collection[BlockId], num_new: int) -> bool:
        """Whether ``num_new`` blocks beside the ``cached`` ones leave those that run in peace."""
        spare = self._config.watermark_blocks if self._running else 0
        return self._pool.can_extend(cached, num_new + spare)

    def seal_computed(self, sequence: Sequence) -> None:
        """Seals the blocks that ``num_computed`` has filled, under their keys."""
        num_full = sequence.num_computed // self._config.block_tokens
        if num_full <= sequence.num_sealed:
            return
        keys = sequence.keys
        for index in range(sequence.num_sealed, num_full):
            self._pool.seal(sequence.block_ids[index], keys[index])
        sequence.num_sealed = num_full

    # One step

    def schedule(self, now_seconds: float) -> Plan:
        """The next step's plan; empty when nothing fits. The runner must run it."""
        self.admitted.clear()
        self.preempted.clear()
        preempted = self._make_room()
        rows = self._decode_rows()
        rows += self._chunk_rows(rows, preempted, now_seconds)
        self._stalled = not rows and not preempted
        rows.sort(key=_is_chunk)
        self.num_steps += 1
        copies, self._copies = tuple(self._copies), []
        return Plan(self.num_steps, tuple(rows), copies)

    def schedule_ahead(self, plan: Plan, sequences: Seq[Sequence]) -> Plan | None:
        """The plan of the step after ``plan``, while that is being computed for ``sequences``: its
        answers go on with whatever they sample. None where :meth:`schedule` would do more than let
        answers grow, once it knows what."""
        going_on = continuing_sequences(self._running, plan, sequences)
        if not going_on or not self._queue_rests(len(going_on)):
            return None
        if not self._grow(going_on, plan):
            return None
        self._turns.charge_decodes([sequence for sequence, _ in going_on])
        self._chunked.clear()
        self.num_steps += 1
        return Plan(self.num_steps, tuple(next_row(each, plan) for each in going_on))

    def _queue_rests(self, num_going_on: int) -> bool:
        """Whether nobody who waits could be admitted if ``num_going_on`` are all that run."""
        if not self._waiting:
            return True
        if num_going_on < len(self._running):
            return False
        return self.num_slots <= 0 or self._is_blocked

    def _grow(self, going_on: list[ContinuingSequence], plan: Plan) -> bool:
        """Gives each the block of its next token, if nobody has to be preempted for that."""
        lacking = [
            each[0] for each in going_on if self._lacks_block(each[0], next_position(each, plan))
        ]
        if not self._pool.can_allocate(len(lacking)):
            return False
        for sequence in lacking:
            sequence.block_ids += tuple(self._pool.allocate(1))
        return True

    def _make_room(self) -> bool:
        """Gives each answer the block of its next token. Whether it took a preemption."""
        preempted = False
        for sequence in list(self._running):
            while sequence.phase is Phase.RUNNING and self._lacks_block(
                sequence, sequence.num_computed
            ):
                if self._pool.can_allocate(1):
                    sequence.block_ids += tuple(self._pool.allocate(1))
                else:
                    self._preempt_latest()
                    preempted = True
        return preempted

    def _lacks_block(self, sequence: Sequence, position: int) -> bool:
        return position >= len(sequence.block_ids) * self._config.block_tokens

    def _preempt_latest(self) -> None:
        victim = self._running.latest_preemptable()
        assert victim is not None, "who lacks a block is preemptable itself"
        victim.waiting.preempted = True
        self._release_blocks(victim)
        self.transfer(victim, Phase.WAITING)
        self.preempted.append(victim)
        self.num_preemptions += 1

    def _decode_rows(self) -> list[Row]:
        decoding = [each for each in self._running if each.num_remaining == 1]
        self._turns.charge_decodes(decoding)
        return [each.row(1) for each in decoding]

    def _chunk_rows(self, decodes: list[Row], preempted: bool, now_seconds: float) -> list[Row]:
        """Shares the budget out in turn; lets the waiting in until one doesn't fit."""
        computing = [each for each in self._running if each.num_remaining > 1]
        admitting = self._may_admit(preempted)
        waiting = self._waiting if admitting else ()
        self._coming.clear()
        budget = self._config.max_step_tokens - len(decodes)
        if computing or waiting:
            budget = self._beside(decodes, computing, budget)
        rows: list[Row] = []
        chunked: set[Sequence] = set()
        for sequence, limit in self._turns.in_turn(computing, waiting, budget, now_seconds):
            if budget == 0:
                break
            if sequence.phase is Phase.RUNNING:
                self._adopt(sequence)
                sequence.num_adopted += self._copy_tail(sequence)
            else:
                admitting = admitting and self._admit_one(sequence)
                if not admitting:
                    continue
            row = self._chunk(sequence, min(limit, budget))
            if row is not None:
                rows.append(row)
                chunked.add(sequence)
                budget -= row.num_tokens
                self._turns.charge_chunk(sequence, row.num_tokens)
        self._note_pauses(computing, chunked)
        return rows

    def _beside(self, decodes: list[Row], computing: list[Sequence], budget: int) -> int:
        """How much of ``budget`` prompts get beside these answers."""
        if not decodes:
            return budget
        context_tokens = sum(row.context_tokens for row in decodes)
        deepest = max((each.num_computed for each in computing), default=0)
        return self._prompt_tokens(len(decodes), context_tokens, deepest, budget)

    def _note_pauses(self, computing: list[Sequence], chunked: set[Sequence]) -> None:
        """Counts who got a chunk in the last step, and in this one others did."""
        self.num_pauses += sum(
            each in self._chunked and each not in chunked and each.num_remaining > 1
            for each in computing
        )
        self._chunked = chunked

    def _adopt(self, sequence: Sequence) -> None:
        """Takes over the blocks that follow and that others have sealed meanwhile: an import, or
        a request with the same prompt. The last known token is always computed."""
        if sequence.scores_prompt:
            return
        block_tokens = self._config.block_tokens
        first = sequence.num_sealed
        limit = (sequence.num_known - 1) // block_tokens
        found = self._pool.find(sequence.keys[first:limit])
        if not found:
            return
        own = sequence.block_ids[first : first + len(found)]
        sequence.num_shared += self._num_used(found)
        self._pool.reference(found)
        rest = sequence.block_ids[first + len(found) :]
        sequence.block_ids = (*sequence.block_ids[:first], *found, *rest)
        self._pool.release(own)
        sequence.num_sealed += len(found)
        end = sequence.num_sealed * block_tokens
        sequence.num_adopted += end - sequence.num_computed
        sequence.num_computed = end

    def _copy_tail(self, sequence: Sequence) -> int:
        """Copy on write: a block that another request has begun with the same tokens, after the
        same prefix, is copied as far as it goes. Returns how many tokens that spares; the last
        known token is always computed, and so is a block's: it is sealed by whoever fills it."""
        block_tokens, first = self._config.block_tokens, sequence.num_sealed
        start = first * block_tokens
        end = min(start + block_tokens, sequence.num_known) - 1
        wanted = sequence.token_ids[start:end]
        if sequence.num_computed != start or not wanted or sequence.scores_prompt:
            return 0
        best, length = None, 0
        for other in (*self._running, *self.lineups[Phase.HELD]):
            if other is not sequence and _same_head(other, sequence, first):
                have = other.token_ids[start : min(start + block_tokens, other.num_computed)]
                count = _common(wanted, have)
                if count > length:
                    best, length = other, count
        if best is None:
            return 0
        self._copies.append((best.block_ids[first], sequence.block_ids[first]))
        sequence.num_computed += length
        return length

    def _chunk(self, sequence: Sequence, budget: int) -> Row | None:
        """None while another computes in this very step what comes next: it is taken over then."""
        first = sequence.num_sealed
        comes = sequence.keys[first : first + 1] and sequence.keys[first] in self._coming
        if comes and not sequence.scores_prompt:
            return None
        row = sequence.row(min(sequence.num_remaining, self._config.chunk_limit, budget))
        self._coming.update(sequence.keys[first : row.context_tokens // self._config.block_tokens])
        return row

    # Admission

    def _may_admit(self, preempted: bool) -> bool:
        """Cheap reasons not to look at the queue: it is empty, or blocked as it was before, or
        somebody was sent back to it just now."""
        if not self._waiting:
            self._blocked_at = None
            return False
        if preempted:
            self._blocked_at = self._pool.num_allocatable
            return False
        if self.num_slots <= 0:
            self._blocked_at = _ASK_AGAIN
            return False
        return not (self._is_blocked and self._running)

    @property
    def _is_blocked(self) -> bool:
        """The first in the queue did not fit, and nothing was freed since."""
        return self._blocked_at is not None and self._pool.num_allocatable <= self._blocked_at

    def _admit_one(self, sequence: Sequence) -> bool:
        """WAITING → RUNNING if there is room. The last known token is always computed, and
        never into a shared block, so a fully cached prompt recomputes its last one."""
        if self.num_slots <= 0:
            self._blocked_at = _ASK_AGAIN
            return False
        limit = (sequence.num_known - 1) // self._config.block_tokens
        if not self._take_blocks(sequence, limit):
            return False
        sequence.num_computed = sequence.num_sealed * self._config.block_tokens
        self._copy_tail(sequence)
        if sequence.first_start is None:
            sequence.first_start = sequence.num_computed
            self.admitted.append(sequence)
        self.transfer(sequence, Phase.RUNNING)
        self._reserved_last = False
        return True

    def _take_blocks(self, sequence: Sequence, cached_limit: int) -> bool:
        """Fills the block table: cached blocks, ``cached_limit`` at most, then new ones. Else
        ``_blocked_at`` says when to ask again."""
        cached = self._pool.find(sequence.keys, 0 if sequence.scores_prompt else cached_limit)
        num_new = self._config.blocks_for(sequence.num_known) - len(cached)
        if not self.fits(cached, num_new):
            self._note_blocked(sequence, self._pool.num_allocatable)
            return False
        sequence.num_shared = self._num_used(cached)
        if self._config.forecast and not sequence.waiting.preempted:
            others = (*self._running, *self._reserved)
            if not memory_suffices(self._pool, self._config, others, sequence):
                self._note_blocked(sequence, _ASK_AGAIN)  # it may do with nothing freed
                return False
        self._pool.reference(cached)
        sequence.block_ids = (*cached, *self._pool.allocate(num_new))
        sequence.num_sealed = len(cached)
        return True

    def _note_blocked(self, sequence: Sequence, blocked_at: int) -> None:
        """Reservations ask by themselves."""
        if sequence.phase is Phase.WAITING:
            self._blocked_at = blocked_at

    def _num_used(self, block_ids: Collection[BlockId]) -> int:
        """How many of these cached blocks somebody uses."""
        return sum(self._pool.num_references(block_id) > 0 for block_id in block_ids)

    def _release_blocks(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_ids)
        sequence.block_ids = ()
        sequence.num_shared = 0
        sequence.num_computed = 0
        sequence.num_sealed = 0


def _is_chunk(row: Row) -> bool:
    return len(row.token_ids) > 1


def _same_head(one: Sequence, other: Sequence, num_blocks: int) -> bool:
    """Whether both have the same first blocks, of the same tenant."""
    if num_blocks == 0:
        return one.spec.tenant_salt == other.spec.tenant_salt
    return one.keys[num_blocks - 1 : num_blocks] == other.keys[num_blocks - 1 : num_blocks]


def _common(one: list[TokenId], other: list[TokenId]) -> int:
    """Length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
