"""The engine: one pool, one scheduler, one runner, and the requests between them."""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import replace

from baton.clock import Clock
from baton.core.answer_length_predictor import AnswerLengthPredictor
from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import BlockId, BlockKey, RequestId, TokenId
from baton.core.request import (
    PROMPT_PREFILLED,
    FinishReason,
    RequestOutput,
    RequestSpec,
    TokenLogprob,
)
from baton.core.task import Task
from baton.core.tenant import tenant_tag
from baton.engine.block_pool import BlockPool
from baton.engine.cache_transfers import CacheTransfers
from baton.engine.config import EngineConfig
from baton.engine.constraint import Constraint
from baton.engine.decode_cost_model import DecodeCostModel
from baton.engine.executor import PlanExecutor, SyncExecutor
from baton.engine.inflight import InflightStep, InflightSteps
from baton.engine.integrity import check_owners, check_queues, check_sequence
from baton.engine.key_chain import BlockKeyChain, BlockKeyHasher
from baton.engine.plan import Row, Runner, SampledToken, StepOutput
from baton.engine.prefill_budget import PrefillBudget
from baton.engine.prefill_cost_model import PrefillCostModel
from baton.engine.request_validation import isolate_constraint, validate_spec, validate_tokens
from baton.engine.result import (
    EngineStats,
    MigratedSequence,
    PrefillProgress,
    Reservation,
    SealedRun,
    StepResult,
    StepWork,
)
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Phase, Sequence
from baton.errors import Invalid, NotFound, Overloaded

__all__ = ["Engine", "EngineStats", "PrefillProgress", "Reservation", "SealedRun", "StepResult"]

PUBLISH_INTERVAL_BLOCKS = 16
"""A growing answer's blocks are worth keeping before it ends, in case its worker dies."""


class Engine:
    """Single-threaded and synchronous: all calls come from one thread.

    A WHOLE or PREFILL request enters by :meth:`add`. A DECODE request enters by
    :meth:`reserve`, whose blocks the caller fills, and :meth:`start`. :meth:`step` while
    :meth:`has_work`. A request leaves by its last output, or by :meth:`abort`; a PREFILL one
    is HELD after its output, its blocks pinned, until :meth:`release`.

    With a ``pipeline`` of its own, the step after the one that :meth:`step` tells of may be on its
    way already: whatever its requests sample, they go on with it. Who turns out to have ended, or
    is aborted, gets nothing of that step, and keeps its blocks until it is over.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        model_digest: bytes,
        kv_dtype: str,
        eos_token_ids: frozenset[TokenId],
        clock: Clock,
        pipeline: PlanExecutor | None = None,
    ) -> None:
        if runner.block_tokens != config.block_tokens:
            raise Invalid(
                f"block_tokens is {config.block_tokens}, the runner's is {runner.block_tokens}",
                param="block_tokens",
            )
        self._config = config
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._pool = BlockPool(runner.num_blocks)
        self._speed = PrefillCostModel()
        self._decode_speed = DecodeCostModel()
        self._lengths = AnswerLengthPredictor(config.growth_tokens)
        self._budget = PrefillBudget(config.token_gap_seconds, self._decode_speed.cost)
        self._scheduler = Scheduler(self._pool, config, self._prefill_seconds, self._budget.tokens)
        self._imports = CacheTransfers(self._pool, self._scheduler)
        self.keys = BlockKeyHasher(model_digest, kv_dtype, config.block_tokens)
        self._sequences: dict[RequestId, Sequence] = {}
        self._num_arrivals = 0
        self._flights = InflightSteps(
            self._scheduler,
            pipeline or SyncExecutor(runner),
            clock,
            self._sequences,
            looks_ahead=pipeline is not None,
        )

    # Requests come and go

    def add(
        self,
        spec: RequestSpec,
        task: Task,
        constraint: Constraint | None = None,
        chain: BlockKeyChain | None = None,
    ) -> None:
        """Queues a WHOLE or PREFILL request. ``constraint`` is that of its grammar, where the
        answer is after ``spec.token_ids``, and ``chain`` that of ``self.keys`` if it was made
        already; the engine owns it from now on. Raises Invalid when it could never be served or its
        id is taken, Overloaded when the queue is full."""
        assert task is not Task.DECODE, "a DECODE request enters by reserve()"
        self._check(spec, task)
        validate_tokens(spec.token_ids, self._config)
        constraint = isolate_constraint(spec, constraint)
        num_waiting = len(self._scheduler.lineups[Phase.WAITING])
        if num_waiting >= self._config.max_waiting:
            raise Overloaded(f"{num_waiting} requests are waiting already")
        sequence = self._new_sequence(spec, task, Phase.WAITING, chain)
        sequence.constraint = constraint
        self._enter(sequence)
        self._scheduler.enqueue(sequence)

    def reserve(self, spec: RequestSpec, chain: BlockKeyChain | None = None) -> Reservation | None:
        """Blocks for the tokens of a DECODE request, once memory is predicted to suffice for its
        answer, too.

        None when it doesn't now: try again after a later step. ``chain`` and Invalid as in
        :meth:`add`.
        Ends with :meth:`start` or :meth:`abort`.
        """
        self._check(spec, Task.DECODE)
        sequence = self._new_sequence(spec, Task.DECODE, Phase.RESERVED, chain)
        if not self._scheduler.reserve(sequence):
            return None
        self._enter(sequence)
        return Reservation(sequence.block_ids, sequence.num_sealed)

    def start(
        self, request_id: RequestId, token_id: TokenId, constraint: Constraint | None = None
    ) -> None:
        """KV of all ``token_ids`` of the reservation has landed: join the batch.

        ``token_id`` is the answer's next token, known to the client already; ``constraint`` that of
        :meth:`add`, before it. If the answer ends with it, the request ends here, without an
        output. NotFound if there is no such reservation; Invalid without a needed constraint, or
        for a token that the model does not have.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.phase is not Phase.RESERVED:
            raise NotFound(f"there is no reservation for request {request_id}")
        sequence.constraint = constraint = isolate_constraint(sequence.spec, constraint)
        validate_tokens((*sequence.spec.token_ids, token_id), self._config)
        sequence.num_computed = sequence.num_known
        self._scheduler.seal_computed(sequence)
        sequence.first_start = 0  # here nothing is counted as cached: the source did that
        sequence.num_published = sequence.num_sealed
        sequence.append(token_id)
        self._scheduler.transfer(sequence, Phase.RUNNING)
        if sequence.finish_reason(self._eos_token_ids) is not None:
            self._finish(sequence)
        elif constraint is not None:
            constraint.accept(token_id)

    def release(self, request_id: RequestId) -> None:
        """The hand-off of a PREFILL request is over: its blocks are unpinned, and stay cached.

        Before its output it is the same as :meth:`abort`. Idempotent."""
        sequence = self._sequences.get(request_id)
        assert sequence is None or sequence.task is Task.PREFILL, f"{request_id} isn't held"
        self.abort(request_id)

    def abort(self, request_id: RequestId, *, quarantine: bool = False) -> bool:
        """Ends a request in whatever phase, and frees its blocks. False when it is unknown.

        With ``quarantine``, a reservation's blocks beyond the cached ones may still be written
        to, and stay out of use until :meth:`release_quarantine` gets them, all of
        ``reservation.block_ids[num_cached_blocks:]``.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if quarantine and sequence.phase is Phase.RESERVED:
            self._pool.quarantine(sequence.block_ids[sequence.num_sealed :])
            sequence.block_ids = sequence.block_ids[: sequence.num_sealed]
        self._finish(sequence)
        return True

    def is_waiting(self, request_id: RequestId) -> bool:
        """Whether it is in the queue, with nothing of it computed."""
        sequence = self._sequences.get(request_id)
        return sequence is not None and sequence.phase is Phase.WAITING

    def pass_on(self, request_id: RequestId, heir: RequestId) -> MigratedSequence | None:
        """Takes an answer out of the batch, and holds its blocks under the name of ``heir`` for
        another worker to read. None when no token of it was answered here yet, it is not running,
        or a step of it is on its way: ask again after the next one. Ends with :meth:`abort` of
        ``heir``."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.phase is not Phase.RUNNING:
            return None
        if sequence.num_known == len(sequence.spec.token_ids) or sequence.num_remaining != 1:
            return None
        if self._flights.has(sequence):
            sequence.is_leaving = True
            return None
        del self._sequences[request_id]
        sequence.spec = replace(sequence.spec, request_id=heir)
        self._sequences[heir] = sequence
        self._scheduler.transfer(sequence, Phase.HELD)
        sequence.constraint = None  # whoever goes on finds its place by the tokens
        num_blocks = self._config.blocks_for(sequence.num_computed)
        progress = PrefillProgress(
            heir,
            sequence.num_computed,
            sequence.block_ids[:num_blocks],
            keys=tuple(sequence.keys[: sequence.num_sealed]),
            num_cached_tokens=0,
        )
        runs = _sealed_run(sequence, sequence.num_sealed)
        return MigratedSequence(progress, sequence.token_ids[-1], tuple(runs))

    def release_quarantine(self, block_ids: Seq[BlockId]) -> None:
        """Nobody can write to these blocks any more: they are free again."""
        self._pool.release_quarantine(block_ids)
        self._scheduler.wake()

    # The prefix cache

    def key_root(self, tenant_salt: bytes) -> BlockKey:
        """The start of a tenant's key chains."""
        return self.keys.root(tenant_salt)

    def num_cached_blocks(self, keys: Seq[BlockKey]) -> int:
        """How many leading ones of ``keys`` the pool holds. Changes nothing."""
        return self._pool.count_cached(keys)

    def begin_import(
        self, keys: Seq[BlockKey], *, after: Seq[BlockKey] = ()
    ) -> list[BlockId] | None:
        """Blocks to be filled from the store or a peer, one per key; None when there is no
        room. ``after`` are the keys that precede them, whose cached blocks are pinned as long.
        Ends with :meth:`finish_import`."""
        return self._imports.begin(keys, after)

    def finish_import(
        self,
        keys: Seq[BlockKey],
        block_ids: Seq[BlockId],
        num_good: int,
        *,
        quarantine: bool = False,
    ) -> None:
        """The first ``num_good`` blocks hold what their keys name, and join the cache, unless
        it has got them meanwhile. The others are freed or, if they may still be written to,
        quarantined."""
        self._imports.finish(keys, block_ids, num_good, quarantine=quarantine)

    # One step

    def has_work(self) -> bool:
        """Whether :meth:`step` would do something."""
        return self._flights.is_coming or self._scheduler.has_work

    def step(self) -> StepResult:
        """Schedules, runs, applies. An empty result when nothing could be scheduled."""
        flight, output = self._flights.land()
        if not flight.plan.rows:
            return StepResult(preempted=flight.preempted)
        work = StepWork.of(flight.plan, flight.seconds)
        self._speed.record(work)
        self._decode_speed.record(work)
        self._budget.record(work)
        told = StepResult(work=work, admitted=flight.admitted, preempted=flight.preempted)
        return self._apply(flight, output, told)

    def close(self) -> None:
        """Returns once nothing is being computed. The last call."""
        self._flights.close()

    def _apply(self, flight: InflightStep, output: StepOutput, told: StepResult) -> StepResult:
        """Adds to ``told`` what becomes of the plan's requests, but for those that have ended."""
        outputs: list[RequestOutput] = []
        progress: list[PrefillProgress] = []
        sealed: list[SealedRun] = []
        rows = flight.plan.rows
        scores = output.scores or ((),) * len(rows)
        shares = zip(rows, flight.sequences, output.sampled, scores, strict=True)
        for row, sequence, sampled, scored in shares:
            if sequence.phase is Phase.FINISHED:
                continue
            sequence.num_computed = row.start + len(row.token_ids)
            assert len(scored) == len(row.targets), f"scores of {row.request_id}"
            if row.targets:
                sequence.scores[row.start :] = scored
            self._scheduler.seal_computed(sequence)
            num_sealed = sequence.num_sealed
            if sequence.task is Task.PREFILL:
                progress.append(self._progress(sequence, row))
            assert (sampled is not None) == row.sample or row.mask, f"row of {row.request_id}"
            if sampled is not None:
                outputs.append(self._accept(sequence, sampled))
            elif row.sample:
                outputs.append(self._end_astray(sequence))
            if num_sealed > sequence.num_published:
                sealed += _sealed_run(sequence, num_sealed)
        return StepResult(
            tuple(outputs), tuple(progress), tuple(sealed), told.work, told.admitted, told.preempted
        )

    def _progress(self, sequence: Sequence, row: Row) -> PrefillProgress:
        first_start = sequence.first_start
        assert first_start is not None, "it was admitted"
        return PrefillProgress(
            sequence.request_id,
            sequence.num_computed,
            sequence.block_ids,
            keys=tuple(sequence.keys[: sequence.num_sealed]),
            num_cached_tokens=first_start,
        )

    def _accept(self, sequence: Sequence, sampled: SampledToken) -> RequestOutput:
        """The sampled token becomes known; the request goes on, is held, or ends."""
        spec = sequence.spec
        num_known = sequence.num_known
        first_index = num_known - spec.num_prompt_tokens
        sequence.append(sampled.token_id)
        finish_reason = sequence.finish_reason(self._eos_token_ids)
        if sequence.task is Task.PREFILL:
            sequence.constraint = None  # the reader finds its place by the tokens
            self._scheduler.transfer(sequence, Phase.HELD)
        elif finish_reason is not None:
            cut = finish_reason is FinishReason.LENGTH
            self._lengths.learn(spec.owner, first_index + 1, cut=cut)
            self._finish(sequence)
        elif sequence.constraint is not None:
            sequence.constraint.accept(sampled.token_id)
        output = RequestOutput(
            spec.request_id,
            spec.epoch,
            first_index,
            (sampled.token_id,),
            logprobs=() if sampled.logprob is None else (sampled.logprob,),
            finish_reason=finish_reason,
        )
        if num_known == len(spec.token_ids):
            output.cached_tokens = sequence.cached_tokens
            output.prompt_logprobs = _pop_prompt_logprobs(sequence)
        return output

    def _end_astray(self, sequence: Sequence) -> RequestOutput:
        """The grammar lets no token come next: the request ends here, and the engine goes on."""
        spec, constraint = sequence.spec, sequence.constraint
        assert constraint is not None, f"{spec.request_id} has no grammar"
        self._finish(sequence)
        return RequestOutput(
            spec.request_id,
            spec.epoch,
            sequence.num_known - spec.num_prompt_tokens,
            (),
            finish_reason=FinishReason.ERROR,
            error=constraint.error or "the grammar allows no token here",
            cached_tokens=sequence.cached_tokens,
            details={"error_status": "INVALID_ARGUMENT", PROMPT_PREFILLED: "true"},
        )

    def pin_cached(self, keys: Seq[BlockKey], first: int) -> list[BlockId]:
        """References the cached blocks of ``keys[first:]``, as far as they go, for whoever reads
        them. Ends with :meth:`unpin`."""
        return self._imports.pin(self._pool.find(keys[first:]))

    def unpin(self, block_ids: Seq[BlockId]) -> None:
        self._imports.unpin(block_ids)

    def num_computed_tokens(self, request_id: RequestId) -> int | None:
        """How far a request is; None when it is not here."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else sequence.num_computed

    def expected_tokens(self, spec: RequestSpec) -> int:
        """Length of the answer, as far as those before it tell. Changes nothing."""
        return self._lengths.expect(spec.owner, spec.sampling.max_tokens)

    # What it has to do, and how fast it is

    @property
    def sequences(self) -> Collection[Sequence]:
        """Every request that is here, to look at."""
        return self._sequences.values()

    def prefill_cost(self) -> PrefillCost | None:
        """None before enough was measured."""
        return self._speed.cost(self._config.chunk_limit)

    def prefill_error(self) -> float | None:
        """How sure that is: see :class:`baton.core.worker_load.WorkerLoad`."""
        return self._speed.error()

    def decode_cost(self) -> DecodeCost | None:
        """None before enough was measured."""
        return self._decode_speed.cost()

    # Self-help

    def stats(self) -> EngineStats:
        lineups = self._scheduler.lineups
        unfinished = [*lineups[Phase.WAITING], *lineups[Phase.RUNNING]]
        return EngineStats(
            running=len(lineups[Phase.RUNNING]),
            waiting=len(lineups[Phase.WAITING]),
            held=len(lineups[Phase.HELD]),
            reserved=len(lineups[Phase.RESERVED]),
            queued_tokens=sum(
                each.num_remaining
                for each in unfinished
                if each.phase is Phase.WAITING or each.num_remaining > 1
            ),
            num_steps=self._scheduler.num_steps,
            num_preemptions=self._scheduler.num_preemptions,
            num_pauses=self._scheduler.num_pauses,
            pool=self._pool.counts,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when the books don't balance. Call it between steps."""
        self._pool.check_integrity()
        check_queues(self._sequences, self._scheduler)
        owners = [*self._sequences.values(), *self._flights.gone]
        check_owners(owners, self._imports.owned(), self._pool)
        for sequence in self._sequences.values():
            root = self.key_root(sequence.spec.tenant_salt)
            check_sequence(sequence, root, self._pool, self._config)

    def describe(self) -> str:
        """The pool and every request, as text."""
        lines = [self._pool.describe()]
        lines += [
            sequence.describe()
            for lineup in self._scheduler.lineups.values()
            for sequence in lineup
        ]
        return "\n".join(lines)

    def _check(self, spec: RequestSpec, task: Task) -> None:
        if spec.request_id in self._sequences:
            raise Invalid(f"request {spec.request_id} is here already", param="request_id")
        validate_spec(spec, task, self._config, self._pool.num_blocks)

    def _new_sequence(
        self, spec: RequestSpec, task: Task, phase: Phase, chain: BlockKeyChain | None
    ) -> Sequence:
        self._num_arrivals += 1
        sequence = Sequence(
            spec,
            task,
            phase,
            chain=chain or self.keys.chain(spec),
            arrival=self._num_arrivals,
            arrival_seconds=self._clock.monotonic(),
            max_model_tokens=self._config.max_model_tokens,
        )
        sequence.expected_tokens = self.expected_tokens(spec)
        if spec.sampling.min_tokens:
            sequence.endings = tuple(self._eos_token_ids.union(spec.sampling.stop_token_ids))
        return sequence

    def _prefill_seconds(self, start: int, end: int) -> float | None:
        return self._speed.seconds_alone(start, end, self._config.chunk_limit)

    def _enter(self, sequence: Sequence) -> None:
        self._sequences[sequence.request_id] = sequence

    def _finish(self, sequence: Sequence) -> None:
        self._flights.finish(sequence)
        del self._sequences[sequence.request_id]


def _pop_prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprob, ...]:
    """Told once, with the first output."""
    scores, sequence.scores = tuple(sequence.scores), []
    return scores


def _sealed_run(sequence: Sequence, num_sealed: int) -> list[SealedRun]:
    """Once a prompt is computed, an answer has grown by some blocks, or has ended. A request that
    has ended has given its blocks back; ``num_sealed`` were its own."""
    grown = num_sealed - sequence.num_published
    over = sequence.phase in (Phase.HELD, Phase.FINISHED)
    ripe = grown >= PUBLISH_INTERVAL_BLOCKS and sequence.num_remaining == 1
    if grown <= 0 or not (over or ripe):
        return []
    tag = sequence.spec.tenant or tenant_tag(sequence.spec.tenant_salt)
    run = SealedRun(tuple(sequence.keys[:num_sealed]), sequence.num_published, tag)
    sequence.num_published = num_sealed
    return [run]
