"""Tests that a request's tokens do not depend on batching, preemption, caching, KV transfers or
aborts.

The tests run two engines, ``left`` and ``right``, with fake model runners. A request either runs
entirely on one of them, or is prefilled on ``left``, transferred block by block, and decoded on
``right``.
"""

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.core.adapter import AdapterRef
from baton.core.attention_window import AttentionWindow
from baton.core.block_key import block_keys, grouped_keys
from baton.core.ids import BlockId, BlockKey, Epoch, RequestId, TokenId
from baton.core.prefill_order import PREFILL_ORDERS
from baton.core.request import FinishReason, RequestOutput, RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine, PrefillProgress, Reservation
from baton.engine.executor import PlanExecutor
from baton.engine.kv_window import NO_BLOCK
from baton.engine.lora.table import LoadedAdapter
from baton.engine.plan import Plan, Runner, StepOutput
from baton.errors import Invalid, Overloaded
from testkit.fakes.runner import FakeRunner, reference_answer
from tests.engine_state import exported_blocks

Blocks = tuple[int, int]
"""The sizes of the pools of both engines."""

VOCAB_SIZE = 40
EOS = frozenset({TokenId(3)})
MAX_STEPS = 4000
WINDOWS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"window_tokens": st.integers(1, 40)}),
    st.fixed_dictionaries(
        {
            "window_tokens": st.integers(1, 40),
            "num_full_groups": st.integers(1, 2),
            "num_windowed_groups": st.integers(1, 3),
        }
    ),
)
"""Settings of :class:`EngineConfig`: no window, a window in all layers, or groups of layers."""
ATTENTION_WINDOWS = st.none() | st.builds(AttentionWindow, st.integers(0, 12), st.integers(1, 24))
ADAPTERS = [AdapterRef(name, name.encode() * 16) for name in "ab"]


@dataclass
class Job:
    """One request of the workload, and its results."""

    spec: RequestSpec
    route: str
    arrival_round: int
    abort_round: int | None
    imports: bool
    tokens: list[TokenId] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    aborted: bool = False
    refused: bool = False
    # Only for a job that is transferred: ``progress`` is how far ``left`` has computed the prompt,
    # and ``reservation`` has the blocks that ``right`` has reserved for the job.
    progress: list[PrefillProgress] = field(default_factory=list)
    reservation: Reservation | None = None
    started: bool = False
    cached_tokens: int | None = None

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.aborted or self.refused


class TimedRunner(FakeRunner):
    """A runner whose steps advance the clock, so that deadlines pass and the engine can measure how
    fast the steps are."""

    def __init__(self, clock: ManualClock, num_blocks: int, config: EngineConfig) -> None:
        groups = config.num_full_groups, config.num_windowed_groups
        super().__init__(num_blocks, config.block_tokens, VOCAB_SIZE, config.window_tokens, groups)
        self._clock = clock

    def run(self, plan: Plan) -> StepOutput:
        self._clock.advance(0.001 + 0.001 * plan.num_tokens)
        return super().run(plan)


@dataclass
class EngineUnderTest:
    runner: FakeRunner
    engine: Engine


class EnginePair:
    """Drives both engines and the KV transfers between them, one round at a time."""

    def __init__(self, left: EngineConfig, right: EngineConfig, blocks: tuple[int, int]) -> None:
        self.clock = ManualClock()
        self.block_tokens = left.block_tokens
        self.window = left.window_tokens
        self.groups = left.num_full_groups, left.num_windowed_groups
        self.left = self._side(left, blocks[0])
        self.right = self._side(right, blocks[1])
        self.store: dict[BlockKey, bytes] = {}
        self.quarantined: list[BlockId] = []
        self.jobs: dict[RequestId, Job] = {}

    def _side(self, config: EngineConfig, num_blocks: int) -> EngineUnderTest:
        runner = TimedRunner(self.clock, num_blocks, config)
        engine = Engine(
            runner,
            config,
            model_digest=b"fake",
            kv_dtype="float64",
            eos_token_ids=EOS,
            clock=self.clock,
            executor=self._pipeline(runner),
        )
        for adapter in ADAPTERS:
            engine.add_adapter(LoadedAdapter(adapter.digest, None))
        return EngineUnderTest(runner, engine)

    def keys(self, spec: RequestSpec) -> list[BlockKey]:
        root = self.left.engine.key_hasher.root_key_of(spec)
        keys = block_keys(root, spec.token_ids, self.block_tokens)
        return grouped_keys(keys, self.left.engine.config.num_groups)

    def _pipeline(self, runner: Runner) -> PlanExecutor | None:
        return None

    def run(self, jobs: list[Job]) -> None:
        if self.window is not None:  # such models don't support attention windows
            for job in jobs:
                job.spec = replace(job.spec, attention_window=None)
        for number in range(MAX_STEPS):
            for job in jobs:
                if job.arrival_round == number:
                    self.arrive(job)
                if job.abort_round == number and not job.is_over and job.arrival_round <= number:
                    self.abort(job)
            progressed = self.round()
            has_future_jobs = any(job.arrival_round > number for job in jobs)
            if not progressed and not has_future_jobs:
                break
        assert all(job.is_over for job in jobs), self.describe()

    def round(self) -> bool:
        """Run one step on each engine, then advance the KV transfers. Return whether anything
        happened."""
        progressed = False
        self.clock.advance(0.01)
        for side in (self.left, self.right):
            if side.engine.has_work():
                result = side.engine.step()
                progressed = True
                for progress in result.progress:
                    self.on_progress(progress)
                for output in result.outputs:
                    self.on_output(output)
            side.engine.check_integrity()
        for job in self.jobs.values():
            progressed = self.advance_transfer(job) or progressed
        if self.quarantined:  # aborted transfers write once more and then end
            for block_id in self.quarantined:
                size = self.right.runner.block_size_bytes
                self.right.runner.import_block(block_id, b"\xff" * size)
            self.right.engine.release_quarantine(self.quarantined)
            self.quarantined = []
            progressed = True
        return progressed

    def arrive(self, job: Job) -> None:
        side = self.right if job.route == "right" else self.left
        task = Task.PREFILL if job.route == "transfer" else Task.PREFILL_AND_DECODE
        if job.imports:
            self.import_prefix(side, job.spec)
        try:
            side.engine.add(job.spec, task)
        except (Invalid, Overloaded):
            job.refused = True
        else:
            self.jobs[job.spec.request_id] = job

    def import_prefix(self, side: EngineUnderTest, spec: RequestSpec) -> None:
        """Import those blocks of the prompt that the store has and the engine's pool lacks. The
        second half of the imported blocks is treated as corrupt."""
        keys, window = self.keys(spec), spec.attention_window
        have = side.engine.count_cached_blocks(keys, window)
        missing = [key for key in keys[have:] if key in self.store]
        missing = missing[: next((i for i, k in enumerate(missing) if k != keys[have + i]), None)]
        block_ids = side.engine.begin_import(missing, preceding_keys=keys[:have])
        if block_ids is None:
            return
        side.engine.check_integrity()
        num_good = len(block_ids) - len(block_ids) // 2
        for key, block_id in zip(missing[:num_good], block_ids, strict=False):
            side.runner.import_block(block_id, self.store[key])
        side.engine.finish_import(missing, block_ids, num_good)
        side.engine.check_integrity()
        num_groups = side.engine.config.num_groups
        num_cached = side.engine.count_cached_blocks(keys, window)
        assert num_cached >= (have + num_good) // num_groups * num_groups

    def on_progress(self, progress: PrefillProgress) -> None:
        job = self.jobs[progress.request_id]
        before = job.progress[-1].num_computed_tokens if job.progress else -1
        assert before < progress.num_computed_tokens <= len(job.spec.token_ids)
        keys, num_groups = self.keys(job.spec), self.left.engine.config.num_groups
        num_full = progress.num_computed_tokens // self.block_tokens * num_groups
        assert progress.sealed_keys == tuple(keys[:num_full])
        for key, block_id in zip(progress.sealed_keys, progress.block_ids, strict=False):
            if block_id == NO_BLOCK:
                continue
            data = self.left.runner.export_block(block_id)
            assert self.store.setdefault(key, data) == data
        job.progress.append(progress)

    def on_output(self, output: RequestOutput) -> None:
        job = self.jobs[output.request_id]
        assert not job.is_over
        assert output.epoch == job.spec.epoch
        assert output.first_index == job.spec.num_emitted_tokens + len(job.tokens)
        if job.spec.sampling.logprobs is not None:
            assert [each.token_id for each in output.logprobs] == list(output.token_ids)
        if job.tokens:
            assert output.cached_tokens == 0
        else:
            job.cached_tokens = output.cached_tokens
        job.tokens += output.token_ids
        job.finish_reason = output.finish_reason
        if job.route == "transfer" and job.is_over and job.reservation is None:
            self.left.engine.release_export(output.request_id)
        elif job.route == "transfer" and job.is_over and not job.started:
            self.left.engine.release_export(output.request_id)
            self.right.engine.abort(output.request_id)

    def advance_transfer(self, job: Job) -> bool:
        """Advance the job's KV transfer from ``left`` to ``right``: reserve blocks on ``right``
        once ``left`` has scheduled the prompt's first chunk, and copy the blocks once the prompt is
        computed. Return whether anything happened."""
        if job.route != "transfer" or job.is_over or not job.progress or job.started:
            return False
        request_id = job.spec.request_id
        if job.reservation is None:
            try:
                job.reservation = self.right.engine.reserve_blocks(job.spec)
            except Invalid:  # the pool of ``right`` is too small for this job
                self.abort(job)
                return True
            return job.reservation is not None
        if not job.tokens:
            return False
        window = job.spec.attention_window
        source = exported_blocks(self.left.engine, job.progress[-1], window)
        for index in range(job.reservation.num_cached_blocks, len(source)):
            data = self.left.runner.export_block(source[index])
            self.right.runner.import_block(job.reservation.block_ids[index], data)
        self.right.engine.start_decoding(request_id, job.tokens[0])
        self.left.engine.release_export(request_id)
        job.started = True
        return True

    def abort(self, job: Job) -> None:
        job.aborted = True
        request_id = job.spec.request_id
        known = self.left.engine.abort(request_id)
        if job.reservation is not None and not job.started:
            known = self.right.engine.abort(request_id, quarantine=True) or known
            cached = job.reservation.num_cached_blocks
            self.quarantined += job.reservation.block_ids[cached:]
        else:
            known = self.right.engine.abort(request_id) or known
        assert known
        assert not self.left.engine.abort(request_id)
        assert not self.right.engine.abort(request_id)

    def describe(self) -> str:
        return f"{self.left.engine.describe()}\n{self.right.engine.describe()}"


def check_answer(job: Job, window: int | None, groups: tuple[int, int]) -> None:
    tokens, reason = reference_answer(
        job.spec, vocab_size=VOCAB_SIZE, eos_token_ids=EOS, window=window, groups=groups
    )
    if job.aborted:
        assert tuple(job.tokens) == tokens[: len(job.tokens)]
    elif not job.refused:
        assert (tuple(job.tokens), job.finish_reason) == (tokens, reason)
    if job.cached_tokens is not None:
        assert 0 <= job.cached_tokens < len(job.spec.token_ids)


def check_no_pinned_blocks(side: EngineUnderTest) -> None:
    pool = side.engine.stats().pool
    assert pool.free + pool.idle == pool.num_blocks, side.engine.describe()
    assert not side.engine.has_work()


def prompt(family: int, shared: int, length: int, number: int) -> tuple[TokenId, ...]:
    """Return a prompt. Prompts with the same ``family`` share their first ``shared`` tokens."""
    return tuple(
        TokenId((family * 7 + i) % VOCAB_SIZE if i < shared else (number * 11 + i) % VOCAB_SIZE)
        for i in range(length)
    )


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        max_tokens=draw(st.integers(1, 14)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 3)),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        stop_token_ids=draw(st.sampled_from([(), (TokenId(5),)])),
        ignore_eos=draw(st.booleans()),
    )


@st.composite
def job_lists(draw: st.DrawFn) -> list[Job]:
    jobs = []
    for number in range(draw(st.integers(1, 9))):
        length = draw(st.integers(1, 40))
        sampling = draw(samplings())
        emitted = draw(st.integers(0, min(length, sampling.max_tokens) - 1))
        spec = RequestSpec(
            RequestId(f"r{number}"),
            Epoch(1 + emitted),
            prompt(draw(st.integers(0, 1)), draw(st.integers(0, 40)), length, number),
            length - emitted,
            sampling,
            tenant_salt=draw(st.sampled_from([b"", b"", b"other"])),
            adapter=draw(st.sampled_from([None, None, *ADAPTERS])),
            ttft_slo_seconds=draw(st.sampled_from([0.0, 0.02, 1.0])),
            attention_window=draw(ATTENTION_WINDOWS),
        )
        arrives = draw(st.integers(0, 12))
        rounds = draw(st.none() | st.none() | st.integers(0, 12))
        route = draw(st.sampled_from(["left", "right", "transfer", "transfer"]))
        aborts = None if rounds is None else arrives + rounds
        jobs.append(Job(spec, route, arrives, aborts, imports=draw(st.booleans())))
    return jobs


@st.composite
def configs(draw: st.DrawFn, block_tokens: int, window: dict[str, int]) -> EngineConfig:
    max_batched_tokens = draw(st.integers(1, 40))
    return EngineConfig(
        block_tokens=block_tokens,
        max_model_tokens=64,
        max_batched_tokens=max_batched_tokens,
        chunk_tokens=draw(st.none() | st.integers(1, max_batched_tokens)),
        max_sequences=draw(st.integers(1, 8)),
        max_waiting=draw(st.integers(3, 10)),
        watermark_blocks=draw(st.integers(0, 3)),
        forecasts_memory=draw(st.booleans()),
        growth_tokens=draw(st.integers(0, 10)),
        order=draw(st.sampled_from(list(PREFILL_ORDERS))),
        fairness=draw(st.booleans()),
        admission_window=draw(st.integers(1, 4)),
        **window,
    )


@st.composite
def pairs(draw: st.DrawFn) -> EnginePair:
    block_tokens = draw(st.integers(1, 8))
    # The number of blocks that the largest request needs. Only the pool of ``right`` may have
    # fewer.
    enough = -(-54 // block_tokens)
    blocks = (
        draw(st.integers(enough, 3 * enough)),
        draw(st.integers(enough, 3 * enough) | st.integers(enough // 3 + 1, enough)),
    )
    window = draw(WINDOWS)
    left, right = (draw(configs(block_tokens, window)) for _ in range(2))
    return EnginePair(left, right, times_groups(left, blocks))


def times_groups(config: EngineConfig, blocks: Blocks) -> Blocks:
    """Return the sizes of two pools in blocks of one group of layers."""
    return blocks[0] * config.num_groups, blocks[1] * config.num_groups


@st.composite
def growing_jobs(draw: st.DrawFn) -> list[Job]:
    """Draw jobs with short prompts and long outputs, so that the pool fills up while outputs grow,
    and requests are preempted."""
    jobs = []
    for number in range(draw(st.integers(3, 8))):
        length = draw(st.integers(1, 10))
        sampling = SamplingParams(
            max_tokens=draw(st.integers(15, 40)),
            temperature=0.0,
            presence_penalty=draw(st.sampled_from([0.0, 0.5])),
            ignore_eos=True,
        )
        spec = RequestSpec(
            RequestId(f"r{number}"),
            Epoch(1),
            prompt(0, 5, length, number),
            length,
            sampling,
            attention_window=draw(ATTENTION_WINDOWS),
        )
        arrives = draw(st.integers(0, 20))
        aborts = draw(st.none() | st.none() | st.integers(arrives, arrives + 40))
        route = draw(st.sampled_from(["left", "right", "transfer"]))
        jobs.append(Job(spec, route, arrives, aborts, imports=False))
    return jobs


@st.composite
def tight_pairs(draw: st.DrawFn) -> EnginePair:
    """Draw a pair of engines whose pools are only a little larger than the largest request
    needs."""
    block_tokens = draw(st.integers(1, 6))
    config = EngineConfig(
        block_tokens=block_tokens,
        max_model_tokens=64,
        max_batched_tokens=draw(st.integers(8, 40)),
        watermark_blocks=draw(st.integers(0, 1)),
        forecasts_memory=draw(st.booleans()),
        growth_tokens=draw(st.integers(0, 4)),
        order=draw(st.sampled_from(list(PREFILL_ORDERS))),
        **draw(WINDOWS),
    )
    enough = -(-50 // block_tokens)
    sizes = st.integers(enough, enough + 20 // block_tokens)
    return EnginePair(config, config, times_groups(config, (draw(sizes), draw(sizes))))


@settings(max_examples=300, deadline=None)
@given(pair=pairs(), jobs=job_lists())
def test_every_request_gets_the_tokens_that_it_would_get_alone(
    pair: EnginePair, jobs: list[Job]
) -> None:
    check_workload(pair, jobs)


@settings(max_examples=150, deadline=None)
@given(pair=tight_pairs(), jobs=growing_jobs())
def test_preemption_does_not_change_tokens(pair: EnginePair, jobs: list[Job]) -> None:
    check_workload(pair, jobs)


def check_workload(pair: EnginePair, jobs: list[Job]) -> None:
    pair.run(jobs)
    for job in jobs:
        check_answer(job, pair.window, pair.groups)
    for side in (pair.left, pair.right):
        check_no_pinned_blocks(side)
