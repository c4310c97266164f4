"""Tests that speculative decoding does not change any output.

The workloads are those of ``test_engine_property``: two engines, KV transfers, imports and aborts,
preemption, continued answers (as after a failover), adapters, penalties and logprobs. The drafts
are partly right, and are verified whenever there are any. A wrong draft leaves KV in the pool that
changes every later token unless it is overwritten.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.lora.table import LoadedAdapter
from baton.engine.speculation.draft_model import DraftModelSource
from baton.engine.speculation.draft_source import DraftSource
from testkit.fakes.runner import FakeRunner, reference_answer
from tests.drafting import OracleSource, draft_always
from tests.property.test_engine_property import (
    ADAPTERS,
    EOS,
    VOCAB_SIZE,
    EnginePair,
    EngineUnderTest,
    Job,
    TimedRunner,
    growing_jobs,
    job_lists,
)
from tests.property.test_overlap_property import (
    EXECUTORS,
    Blocks,
    MakeExecutor,
    OverlappedPair,
    check_workload,
    no_executor,
    stopping_jobs,
    tight,
    varied,
)

MakeSource = Callable[[EngineConfig, int], DraftSource]
"""Returns the draft source of an engine with this configuration. The second argument is a seed."""

ALL_EXECUTORS: dict[str, MakeExecutor] = {"none": no_executor, **EXECUTORS}


def known_answer(spec: RequestSpec, config: EngineConfig) -> tuple[TokenId, ...]:
    groups = config.num_full_groups, config.num_windowed_groups
    return reference_answer(
        spec, vocab_size=VOCAB_SIZE, eos_token_ids=EOS, window=config.window_tokens, groups=groups
    )[0]


def oracle(config: EngineConfig, seed: int) -> DraftSource:
    return OracleSource(partial(known_answer, config=config), VOCAB_SIZE, seed)


def draft_model(config: EngineConfig, seed: int) -> DraftSource:
    """Return a draft model that is the model itself, with few blocks of another size."""
    groups = config.num_full_groups, config.num_windowed_groups
    num_blocks = (12 + 4 * seed) * config.num_groups
    runner = FakeRunner(num_blocks, 5, VOCAB_SIZE, config.window_tokens, groups)
    return DraftModelSource(runner, config.max_model_tokens)


class SpeculatingPair(OverlappedPair):
    """Engines that draft, at most ``num_drafts`` tokens for an answer and step."""

    def __init__(
        self,
        engines: tuple[EngineConfig, EngineConfig, Blocks],
        make_executor: MakeExecutor,
        num_drafts: int,
        seed: int,
        make_source: MakeSource = oracle,
    ) -> None:
        self._num_drafts = num_drafts
        self._seed = seed
        self._make_source = make_source
        super().__init__(*engines, make_executor)

    def _side(self, config: EngineConfig, num_blocks: int) -> EngineUnderTest:
        config = replace(config, speculation=True, speculation_tokens=self._num_drafts)
        runner = TimedRunner(self.clock, num_blocks, config)
        engine = Engine(
            runner,
            config,
            model_digest=b"fake",
            kv_dtype="float64",
            eos_token_ids=EOS,
            clock=self.clock,
            executor=self._pipeline(runner),
            draft_source=self._make_source(config, self._seed),
        )
        draft_always(engine)
        for adapter in ADAPTERS:
            engine.add_adapter(LoadedAdapter(adapter.digest, None))
        return EngineUnderTest(runner, engine)


def check_speculation(pair: EnginePair, jobs: list[Job]) -> None:
    check_workload(pair, jobs)
    for side in (pair.left, pair.right):
        stats = side.engine.stats()
        assert 0 <= stats.num_accepted_tokens <= stats.num_drafted_tokens


drafts, seeds = st.integers(1, 8), st.integers(0, 3)


@pytest.mark.parametrize("executor", ALL_EXECUTORS)
@settings(max_examples=60, deadline=None)
@given(engines=varied(), jobs=job_lists(), num_drafts=drafts, seed=seeds)
def test_every_request_gets_the_tokens_that_it_would_get_alone(
    executor: str,
    engines: tuple[EngineConfig, EngineConfig, Blocks],
    jobs: list[Job],
    num_drafts: int,
    seed: int,
) -> None:
    check_speculation(SpeculatingPair(engines, ALL_EXECUTORS[executor], num_drafts, seed), jobs)


@pytest.mark.parametrize("executor", ALL_EXECUTORS)
@settings(max_examples=40, deadline=None)
@given(engines=tight(), jobs=growing_jobs() | stopping_jobs(), num_drafts=drafts, seed=seeds)
def test_preemption_and_stop_tokens_do_not_change_tokens(
    executor: str,
    engines: tuple[EngineConfig, EngineConfig, Blocks],
    jobs: list[Job],
    num_drafts: int,
    seed: int,
) -> None:
    check_speculation(SpeculatingPair(engines, ALL_EXECUTORS[executor], num_drafts, seed), jobs)


@settings(max_examples=150, deadline=None)
@given(
    engines=varied() | tight(),
    jobs=job_lists() | growing_jobs() | stopping_jobs(),
    num_drafts=drafts,
    seed=seeds,
)
def test_drafts_of_the_same_model_are_all_right(
    engines: tuple[EngineConfig, EngineConfig, Blocks],
    jobs: list[Job],
    num_drafts: int,
    seed: int,
) -> None:
    """Each token that the fake draft model samples depends on the KV of all tokens before it, so a
    draft is right only if its KV is, whatever was dropped, rejected or preempted before."""
    for job in jobs:  # it does not know adapters
        job.spec = replace(job.spec, adapter=None)
    pair = SpeculatingPair(engines, no_executor, num_drafts, seed, draft_model)
    check_speculation(pair, jobs)
    for side in (pair.left, pair.right):
        stats = side.engine.stats()
        assert stats.num_accepted_tokens == stats.num_drafted_tokens


def test_drafts_save_steps() -> None:
    """An answer of 14 tokens takes a step for the prompt, four more, and nine right drafts."""
    config = EngineConfig(block_tokens=4, max_model_tokens=64)
    pair = SpeculatingPair((config, config, (40, 40)), no_executor, num_drafts=4, seed=0)
    sampling = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
    spec = RequestSpec(RequestId("r"), Epoch(1), tuple(map(TokenId, range(9))), 9, sampling)
    job = Job(spec, "left", 0, None, imports=False)
    check_speculation(pair, [job])
    stats = pair.left.engine.stats()
    assert (stats.num_steps, stats.num_drafted_tokens, stats.num_accepted_tokens) == (5, 11, 9)
