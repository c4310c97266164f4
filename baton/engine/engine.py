"""The engine: runs the live requests with a block pool, a scheduler and a runner."""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import replace

from baton.clock import Clock
from baton.core.answer_length_predictor import AnswerLengthPredictor
from baton.core.attention_window import AttentionWindow
from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import BlockId, BlockKey, RequestId, TokenId
from baton.core.request import (
    RequestSpec,
)
from baton.core.task import Task
from baton.engine.block_pool import BlockPool
from baton.engine.cache_transfers import CacheTransfers
from baton.engine.config import EngineConfig
from baton.engine.constraint import Constraint
from baton.engine.executor import PlanExecutor, SyncExecutor
from baton.engine.inflight import InflightSteps
from baton.engine.integrity import check_owners, check_queues, check_sequence
from baton.engine.key_chain import BlockKeyChain, BlockKeyChainFactory
from baton.engine.kv_window import NO_BLOCK
from baton.engine.lora.table import AdapterTable, LoadedAdapter
from baton.engine.measured_costs import MeasuredCosts
from baton.engine.plan import Runner
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
from baton.engine.speculation.draft_source import DraftSource
from baton.engine.speculation.ngram_source import NgramSource
from baton.engine.speculation.speculator import Speculator
from baton.engine.step_applier import StepApplier, collect_sealed_run
from baton.errors import Invalid, NotFound, Overloaded

__all__ = ["Engine", "EngineStats", "PrefillProgress", "Reservation", "SealedRun", "StepResult"]


class Engine:
    """The engine is single-threaded and synchronous: all calls must come from one thread, which in
    a worker is :class:`baton.worker.engine_thread.EngineThread`.

    :meth:`add` queues a PREFILL or PREFILL_AND_DECODE request. A DECODE request first gets its
    blocks from :meth:`reserve_blocks`; the caller fills them and then calls :meth:`start_decoding`.
    Call :meth:`step` as long as :meth:`has_work` is true. A request is removed after its last
    output or by :meth:`abort`; a PREFILL request stays in phase EXPORTED after its output, with its
    blocks pinned, until :meth:`release_export` is called.

    If an ``executor`` is given, scheduling is asynchronous: when :meth:`step` returns the result of
    one step, the next step may already be running, having been planned before the sampled tokens
    were known. A request that has ended or was aborted in the meantime gets no output from the next
    step, and its blocks are freed only when the next step is complete.
    :func:`baton.worker.model_loading.build_engine` chooses the executor.

    ``adapters`` are the LoRA adapters that the runner knows; the engine owns them from now on.
    ``draft_source`` proposes tokens for speculative decoding; without it, and with
    ``config.speculation``, they are looked up in prompt and answer. ``lossy_codec`` is the name of
    the lossiest codec that KV in the pool may have passed, empty if there is none.
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
        executor: PlanExecutor | None = None,
        adapters: AdapterTable | None = None,
        draft_source: DraftSource | None = None,
        lossy_codec: str = "",
    ) -> None:
        if runner.block_tokens != config.block_tokens:
            raise Invalid(
                f"block_tokens is {config.block_tokens}; it must be the runner's block size, "
                f"{runner.block_tokens}",
                param="block_tokens",
            )
        if runner.num_groups != config.num_groups:
            raise Invalid(
                f"the settings say that layers are divided into {config.num_groups} groups; the "
                f"runner has {runner.num_groups}",
                param="num_windowed_groups",
            )
        self._config = config
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._pool = BlockPool(runner.num_blocks, config.window)
        self._costs = MeasuredCosts(config)
        self._answer_lengths = AnswerLengthPredictor(config.growth_tokens)
        self._speculator: Speculator | None = None
        if config.speculation:
            self._speculator = Speculator(
                draft_source or NgramSource(), self._pool, config, eos_token_ids
            )
        self._scheduler = Scheduler(
            self._pool,
            config,
            self._costs.prefill_seconds,
            self._costs.max_prefill_tokens,
            self._costs.prompt_slowdown,
            self._speculator,
        )
        self._cache_transfers = CacheTransfers(self._pool, self._scheduler)
        self.key_hasher = BlockKeyChainFactory(
            model_digest, kv_dtype, config.block_tokens, config.num_groups, lossy_codec
        )
        self._adapters = adapters or AdapterTable()
        self._sequences: dict[RequestId, Sequence] = {}
        self._num_arrivals = 0
        self._inflight = InflightSteps(
            self._scheduler,
            executor or SyncExecutor(runner),
            clock,
            self._sequences,
            schedules_ahead=executor is not None,
        )
        self._applier = StepApplier(
            self._scheduler, self._answer_lengths, eos_token_ids, self._finish, self._speculator
        )

    def set_target_inter_token_latency(self, seconds: float | None) -> None:
        """Change the setting ``target_inter_token_latency_seconds`` for the next step and all later
        ones."""
        self._costs.set_target_inter_token_latency(seconds)

    # Adding and removing requests

    def add(
        self,
        spec: RequestSpec,
        task: Task,
        constraint: Constraint | None = None,
        chain: BlockKeyChain | None = None,
    ) -> None:
        """Queue a PREFILL or PREFILL_AND_DECODE request.

        ``constraint`` is the state of the request's grammar after ``spec.token_ids``. ``chain`` is
        the request's key chain, if ``self.key_hasher`` has computed it already; the engine owns it
        from now on. Raises Invalid if the request could never be served or its id is in use,
        Overloaded if the queue is full, Unavailable if the request's adapter is not loaded.
        """
        assert task is not Task.DECODE, "a DECODE request is added by reserve_blocks()"
        self._validate(spec, task)
        validate_tokens(spec.token_ids, self._config)
        constraint = isolate_constraint(spec, constraint)
        num_waiting = len(self._scheduler.queues[Phase.WAITING])
        if num_waiting >= self._config.max_waiting:
            raise Overloaded(f"the engine's queue is full: {num_waiting} requests are waiting")
        sequence = self._new_sequence(spec, task, Phase.WAITING, chain)
        sequence.constraint = constraint
        self._register(sequence)
        self._scheduler.enqueue(sequence)

    def reserve_blocks(
        self, spec: RequestSpec, chain: BlockKeyChain | None = None
    ) -> Reservation | None:
        """Allocate blocks for the known tokens of a DECODE request, provided that memory is
        predicted to suffice for its answer, too.

        Return None if memory does not suffice now; try again after a later step. For ``chain`` and
        the errors, see :meth:`add`. Call :meth:`start_decoding` or :meth:`abort` afterwards.
        """
        self._validate(spec, Task.DECODE)
        sequence = self._new_sequence(spec, Task.DECODE, Phase.RESERVED, chain)
        if not self._scheduler.reserve(sequence):
            return None
        self._register(sequence)
        held = tuple(block_id for block_id in sequence.block_ids if block_id != NO_BLOCK)
        cached = sequence.block_ids[: sequence.num_sealed_blocks]
        return Reservation(held, len(cached) - cached.count(NO_BLOCK))

    def start_decoding(
        self, request_id: RequestId, token_id: TokenId, constraint: Constraint | None = None
    ) -> None:
        """Add a reserved request to the batch. The KV of all its ``token_ids`` must have arrived.

        ``token_id`` is the answer's next token, which the client already has. ``constraint`` is the
        state of the request's grammar before ``token_id``. If the answer ends with ``token_id``,
        the request ends here, without an output. Raises NotFound if the request has no reservation;
        Invalid if it needs a constraint and none is given, or if ``token_id`` is not in the
        vocabulary.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.phase is not Phase.RESERVED:
            raise NotFound(f"there is no reservation for request {request_id}")
        sequence.constraint = constraint = isolate_constraint(sequence.spec, constraint)
        validate_tokens((*sequence.spec.token_ids, token_id), self._config)
        sequence.num_computed_tokens = sequence.num_known_tokens
        self._scheduler.seal_computed(sequence)
        sequence.num_cached_at_admission = (
            0  # the prefill worker has reported the cached tokens already
        )
        sequence.num_published_blocks = sequence.num_sealed_blocks
        sequence.append_token(token_id)
        self._scheduler.change_phase(sequence, Phase.RUNNING)
        if sequence.finish_reason(self._eos_token_ids) is not None:
            self._finish(sequence)
        elif constraint is not None:
            constraint.accept(token_id)

    def release_export(self, request_id: RequestId) -> None:
        """Unpin the blocks of a PREFILL request after its KV transfer; they stay cached.

        If the request has had no output yet, this is the same as :meth:`abort`. Idempotent."""
        sequence = self._sequences.get(request_id)
        assert sequence is None or sequence.task is Task.PREFILL, f"{request_id} is not a prefill"
        self.abort(request_id)

    def abort(self, request_id: RequestId, *, quarantine: bool = False) -> bool:
        """End a request in any phase and free its blocks. Return False if the request is unknown.

        If the request has a reservation and a KV transfer may still write to its blocks, set
        ``quarantine``. The reservation's uncached blocks
        (``reservation.block_ids[num_cached_blocks:]``) are then not reused until
        :meth:`release_quarantine` is called with them.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if quarantine and sequence.phase is Phase.RESERVED:
            table, num_sealed = sequence.block_ids, sequence.num_sealed_blocks
            self._pool.quarantine(table[num_sealed:])
            sequence.num_dropped_blocks -= table[num_sealed:].count(NO_BLOCK)
            sequence.block_ids = table[:num_sealed]
        self._finish(sequence)
        return True

    def is_waiting(self, request_id: RequestId) -> bool:
        """Whether the request is in the waiting queue: it has not started, or was preempted."""
        sequence = self._sequences.get(request_id)
        return sequence is not None and sequence.phase is Phase.WAITING

    def begin_migration(
        self, request_id: RequestId, export_id: RequestId
    ) -> MigratedSequence | None:
        """Take a running request out of the batch so that another worker can continue it, and pin
        its blocks under the request id ``export_id`` for that worker to read.

        Return None if the request is not running, has generated no token here yet, or is part of
        a step in flight; try again after the next step. Call :meth:`abort` with ``export_id`` to
        free the blocks."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.phase is not Phase.RUNNING:
            return None
        if (
            sequence.num_known_tokens == len(sequence.spec.token_ids)
            or sequence.num_uncomputed_tokens != 1
        ):
            return None
        if self._inflight.is_computing(sequence):
            sequence.awaits_migration = True
            return None
        del self._sequences[request_id]
        sequence.spec = replace(sequence.spec, request_id=export_id)
        self._sequences[export_id] = sequence
        self._scheduler.change_phase(sequence, Phase.EXPORTED)
        sequence.constraint = None  # the next worker replays the tokens into its own grammar
        num_blocks = self._config.num_blocks_for(sequence.num_computed_tokens)
        progress = PrefillProgress(
            export_id,
            sequence.num_computed_tokens,
            sequence.block_ids[:num_blocks],
            sealed_keys=tuple(sequence.block_keys[: sequence.num_sealed_blocks]),
            num_cached_tokens=0,
        )
        runs = collect_sealed_run(sequence, sequence.num_sealed_blocks)
        return MigratedSequence(progress, sequence.token_ids[-1], tuple(runs))

    def release_quarantine(self, block_ids: Seq[BlockId]) -> None:
        """Free quarantined blocks. Call this once no transfer can write to them any more."""
        self._pool.release_quarantine(block_ids)
        self._scheduler.retry_admission()

    # LoRA adapters

    @property
    def adapters(self) -> AdapterTable:
        """The loaded adapters, for reading only."""
        return self._adapters

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Let requests use an adapter. Raises Overloaded if too many are loaded."""
        self._adapters.add(adapter)

    def remove_adapter(self, digest: bytes) -> None:
        """Refuse new requests for an adapter, and unload it once no request uses it any more:
        :meth:`drop_unused_adapters` must be called from time to time."""
        self._adapters.retire(digest)
        self.drop_unused_adapters()

    def drop_unused_adapters(self) -> None:
        """Unload the removed adapters that no request uses any more. A request whose KV is only
        kept for another worker does not use its adapter."""
        sequences = self._sequences.values()
        self._adapters.drop_unused(
            {each.spec.adapter_digest for each in sequences if each.phase is not Phase.EXPORTED}
        )

    # The prefix cache

    def key_root(
        self, tenant_salt: bytes, adapter_digest: bytes = b"", *, exact_kv: bool = False
    ) -> BlockKey:
        """Return the root key of a tenant's key chains for the base model or an adapter.
        ``exact_kv``: for requests whose KV must not pass a lossy codec."""
        return self.key_hasher.root_key(tenant_salt, adapter_digest, exact_kv=exact_kv)

    def count_cached_blocks(
        self, keys: Seq[BlockKey], attention_window: AttentionWindow | None = None
    ) -> int:
        """Return how many of the leading ``keys`` are cached in the pool, apart from those that no
        later token reads. ``attention_window`` is the request's. Changes nothing."""
        window = self._config.window_of(attention_window)
        return self._pool.count_cached(keys, window=window)

    def count_cached_tokens(
        self, keys: Seq[BlockKey], attention_window: AttentionWindow | None = None
    ) -> int:
        """Return how many tokens the blocks have that :meth:`count_cached_blocks` counts. Changes
        nothing."""
        return self._config.num_tokens_in(self.count_cached_blocks(keys, attention_window))

    def begin_import(
        self, keys: Seq[BlockKey], *, preceding_keys: Seq[BlockKey] = ()
    ) -> list[BlockId] | None:
        """Allocate blocks to be filled from the store or a peer, one per key. Return None if there
        are too few blocks. ``preceding_keys`` are keys that precede ``keys`` in the chain; their
        cached blocks are pinned until :meth:`finish_import`, which must be called afterwards."""
        return self._cache_transfers.begin_import(keys, preceding_keys)

    def finish_import(
        self,
        keys: Seq[BlockKey],
        block_ids: Seq[BlockId],
        num_valid: int,
        *,
        quarantine: bool = False,
    ) -> None:
        """Add the first ``num_valid`` blocks to the cache, except those whose keys were cached in
        the meantime. The other blocks are freed or, if ``quarantine`` is set because a transfer may
        still write to them, quarantined."""
        self._cache_transfers.finish_import(keys, block_ids, num_valid, quarantine=quarantine)

    # One step

    def has_work(self) -> bool:
        """Whether :meth:`step` would do something."""
        return self._inflight.has_step or self._scheduler.has_work

    def step(self) -> StepResult:
        """Collect the oldest step in flight, scheduling one if there is none
        (:meth:`InflightSteps.collect`), and apply its output. If nothing could be scheduled, the
        result has no outputs; it may still name preempted requests."""
        flight, output = self._inflight.collect()
        if not flight.plan.rows:
            return StepResult(preempted=flight.preempted)
        work = StepWork.from_plan(flight.plan, flight.duration_seconds)
        self._costs.record(work)
        if self._speculator is not None:
            self._speculator.record_step(work)
        result = StepResult(work=work, admitted=flight.admitted, preempted=flight.preempted)
        return self._applier.apply(flight, output, result, self._clock.monotonic())

    def close(self) -> None:
        """Wait until nothing is being computed. Must be the last call."""
        self._inflight.close()

    def pin_cached_blocks(self, keys: Seq[BlockKey], first: int) -> list[BlockId]:
        """Pin the cached blocks of ``keys[first:]`` for a reader, up to the first key that is not
        cached, and return them. Call :meth:`unpin_blocks` afterwards."""
        return self._cache_transfers.pin(self._pool.find_cached_run(keys[first:]))

    def unpin_blocks(self, block_ids: Seq[BlockId]) -> None:
        self._cache_transfers.unpin(block_ids)

    def num_computed_tokens(self, request_id: RequestId) -> int | None:
        """Return how many of a request's tokens are computed; None if the request is unknown."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else sequence.num_computed_tokens

    @property
    def config(self) -> EngineConfig:
        """The engine's settings, as it was created."""
        return self._config

    def predict_answer_tokens(self, spec: RequestSpec) -> int:
        """Predict the length of the answer from earlier answers. Changes nothing."""
        return self._answer_lengths.predict_tokens(spec.owner, spec.sampling.max_tokens)

    # Load and speed

    @property
    def sequences(self) -> Collection[Sequence]:
        """All live requests, for reading only."""
        return self._sequences.values()

    def prefill_cost(self) -> PrefillCost | None:
        """Return the fitted cost of prefill; None before enough steps were measured."""
        return self._costs.prefill_cost()

    def prefill_cost_relative_error(self) -> float | None:
        """Return the relative standard error of :meth:`prefill_cost`, which is reported as
        :attr:`WorkerLoad.prefill_error`; None while it is unknown."""
        return self._costs.prefill_cost_relative_error()

    def decode_cost(self) -> DecodeCost | None:
        """Return the fitted cost of decoding; None before enough steps were measured."""
        return self._costs.decode_cost()

    def max_shared_step_seconds(self, num_answers: int, context_tokens: int) -> float | None:
        """Return how long a step with prompts may take beside ``num_answers`` answers with
        ``context_tokens`` in total; None if there is no limit."""
        return self._costs.max_shared_step_seconds(num_answers, context_tokens)

    def prompt_slowdown(self, num_answers: int, context_tokens: int) -> float:
        """Return how many times as long as alone prompts take beside decodes: see
        :meth:`MeasuredCosts.prompt_slowdown`."""
        return self._costs.prompt_slowdown(num_answers, context_tokens)

    # Diagnostics

    def stats(self) -> EngineStats:
        lineups = self._scheduler.queues
        unfinished = [*lineups[Phase.WAITING], *lineups[Phase.RUNNING]]
        speculator = self._speculator
        return EngineStats(
            running=len(lineups[Phase.RUNNING]),
            waiting=len(lineups[Phase.WAITING]),
            exported=len(lineups[Phase.EXPORTED]),
            reserved=len(lineups[Phase.RESERVED]),
            queued_tokens=sum(
                each.num_uncomputed_tokens
                for each in unfinished
                if each.phase is Phase.WAITING or each.num_uncomputed_tokens > 1
            ),
            num_steps=self._scheduler.num_steps,
            num_preemptions=self._scheduler.num_preemptions,
            num_pauses=self._scheduler.num_pauses,
            pool=self._pool.counts,
            num_drafted_tokens=speculator.num_drafted if speculator else 0,
            num_accepted_tokens=speculator.num_accepted if speculator else 0,
            num_first_tokens=self._applier.num_first_tokens,
            num_late_first_tokens=self._applier.num_late_first_tokens,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when blocks, queues and sequences are inconsistent. Call it
        between steps."""
        self._pool.check_integrity()
        check_queues(self._sequences, self._scheduler)
        owners = [*self._sequences.values(), *self._inflight.ended_sequences]
        check_owners(owners, self._cache_transfers.referenced_blocks(), self._pool)
        for sequence in self._sequences.values():
            root = self.key_hasher.root_key_of(sequence.spec)
            check_sequence(sequence, root, self._pool, self._config)

    def describe(self) -> str:
        """Return the pool and every request as text."""
        lines = [self._pool.describe()]
        lines += [
            sequence.describe() for lineup in self._scheduler.queues.values() for sequence in lineup
        ]
        return "\n".join(lines)

    def _validate(self, spec: RequestSpec, task: Task) -> None:
        if spec.request_id in self._sequences:
            raise Invalid(f"request id {spec.request_id} is already in use", param="request_id")
        validate_spec(spec, task, self._config, self._pool.num_blocks)
        if spec.adapter is not None:
            self._adapters.require(spec.adapter.digest)

    def _new_sequence(
        self, spec: RequestSpec, task: Task, phase: Phase, chain: BlockKeyChain | None
    ) -> Sequence:
        self._num_arrivals += 1
        sequence = Sequence(
            spec,
            task,
            phase,
            chain=chain or self.key_hasher.make_chain(spec),
            arrival=self._num_arrivals,
            arrival_seconds=self._clock.monotonic(),
            max_model_tokens=self._config.max_model_tokens,
            window=self._config.window_of(spec.attention_window),
        )
        sequence.predicted_answer_tokens = self.predict_answer_tokens(spec)
        if spec.sampling.min_tokens:
            sequence.end_token_ids = tuple(self._eos_token_ids.union(spec.sampling.stop_token_ids))
        return sequence

    def _register(self, sequence: Sequence) -> None:
        self._sequences[sequence.request_id] = sequence

    def _finish(self, sequence: Sequence) -> None:
        self._inflight.finish(sequence)
        del self._sequences[sequence.request_id]
