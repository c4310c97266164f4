"""Tests the scheduler's exact decisions: which requests are in a plan, with how many tokens, in
which blocks."""

from dataclasses import replace
from itertools import count

import pytest

from baton.core.block_key import KeyRoot
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.prefill_order import CACHED_TOKENS_PER_SECOND
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.key_chain import BlockKeyChain
from baton.engine.kv_window import KvWindow
from baton.engine.plan import Plan
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import PHASE_TRANSITIONS, Phase, Sequence
from baton.errors import Invalid

ROOT = KeyRoot(b"model", "float32", 4).key()
CONFIG = EngineConfig(
    block_tokens=4,
    max_model_tokens=256,
    max_batched_tokens=16,
    max_sequences=4,
    watermark_blocks=0,
    forecasts_memory=False,
    order="cached_first",
)


class Bench:
    """A scheduler, and a runner that always samples token 7."""

    def __init__(self, num_blocks: int, config: EngineConfig = CONFIG) -> None:
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(self.pool, config)
        self.config = config
        self.now = 0.0
        self._arrivals = count(1)
        self.sequences: dict[str, Sequence] = {}

    def new(self, name: str, tokens: list[int], task: Task, phase: Phase) -> Sequence:
        spec = RequestSpec(
            RequestId(name),
            Epoch(1),
            tuple(TokenId(token) for token in tokens),
            len(tokens),
            SamplingParams(max_tokens=100),
        )
        chain = BlockKeyChain(ROOT, 4)
        chain.extend(spec.token_ids)
        self.sequences[name] = Sequence(
            spec,
            task,
            phase,
            chain=chain,
            arrival=next(self._arrivals),
            arrival_seconds=self.now,
            max_model_tokens=256,
            window=KvWindow(4),
        )
        return self.sequences[name]

    def add(self, name: str, tokens: list[int], task: Task = Task.PREFILL_AND_DECODE) -> Sequence:
        sequence = self.new(name, tokens, task, Phase.WAITING)
        self.scheduler.enqueue(sequence)
        return sequence

    def reserve(self, name: str, tokens: list[int]) -> Sequence | None:
        sequence = self.new(name, tokens, Task.DECODE, Phase.RESERVED)
        return sequence if self.scheduler.reserve(sequence) else None

    def schedule(self) -> Plan:
        return self.scheduler.schedule(self.now)

    def step(self) -> list[tuple[str, int]]:
        """Run a step; return (request, tokens computed) of each row."""
        plan = self.schedule()
        for row in plan.rows:
            sequence = self.sequences[row.request_id]
            sequence.num_computed_tokens = row.context_tokens
            self.scheduler.seal_computed(sequence)
            if row.sample:
                sequence.append_token(TokenId(7))
        return [(row.request_id, row.num_tokens) for row in plan.rows]

    def finish(self, name: str) -> None:
        self.scheduler.finish(self.sequences[name])


def unique_tokens(name: str, length: int) -> list[int]:
    """Return tokens that share no prefix with the tokens of any other ``name``."""
    return [ord(name), *range(100, 99 + length)]


def test_decodes_come_first_then_chunks_within_the_budget() -> None:
    bench = Bench(32)
    bench.add("a", unique_tokens("a", 3))
    assert bench.step() == [("a", 3)]
    bench.add("b", unique_tokens("b", 20))
    bench.add("c", unique_tokens("c", 20))
    assert bench.step() == [("a", 1), ("b", 15)]
    assert bench.step() == [("a", 1), ("b", 5), ("c", 10)]
    assert bench.step() == [("a", 1), ("b", 1), ("c", 10)]
    assert bench.step() == [("a", 1), ("b", 1), ("c", 1)]


def test_chunks_are_capped_per_request() -> None:
    bench = Bench(32, replace(CONFIG, chunk_tokens=4))
    bench.add("a", unique_tokens("a", 10))
    bench.add("b", unique_tokens("b", 3))
    assert bench.step() == [("a", 4), ("b", 3)]
    assert bench.step() == [("b", 1), ("a", 4)]


def test_rows_give_start_and_blocks_of_their_tokens() -> None:
    bench = Bench(32, replace(CONFIG, chunk_tokens=6))
    bench.add("a", unique_tokens("a", 9))
    (row,) = bench.schedule().rows
    assert (row.start, row.token_ids, row.block_ids, row.sample) == (
        0,
        tuple(unique_tokens("a", 9)[:6]),
        (0, 1, 2),
        False,
    )
    bench.sequences["a"].num_computed_tokens = 6
    (row,) = bench.schedule().rows
    assert (row.start, row.token_ids, row.sample) == (6, tuple(unique_tokens("a", 9)[6:]), True)


def test_growing_answer_gets_a_block_when_it_needs_one() -> None:
    bench = Bench(8)
    sequence = bench.add("a", unique_tokens("a", 3))
    tables = []
    for _ in range(7):
        bench.step()
        tables.append(sequence.block_ids)
    assert tables == [(0,), (0,), (0, 1), (0, 1), (0, 1), (0, 1), (0, 1, 2)]
    assert sequence.num_sealed_blocks == 2
    assert bench.pool.find_cached(sequence.block_keys) == [0, 1]


def test_max_running_bounds_the_batch() -> None:
    bench = Bench(32, replace(CONFIG, max_sequences=2))
    for name in "abc":
        bench.add(name, unique_tokens(name, 2))
    assert bench.step() == [("a", 2), ("b", 2)]
    assert bench.step() == [("a", 1), ("b", 1)]
    bench.finish("a")
    assert bench.step() == [("b", 1), ("c", 2)]


def test_batch_is_never_larger_than_the_token_budget() -> None:
    assert replace(CONFIG, max_sequences=64).max_batch_requests == 16


def test_longest_cached_prefix_goes_first() -> None:
    bench = Bench(32, replace(CONFIG, max_sequences=1))
    bench.add("x", unique_tokens("x", 9))
    bench.step()
    bench.finish("x")
    bench.add("cold", unique_tokens("c", 9))
    bench.add("warm", unique_tokens("x", 12))
    assert bench.step() == [("warm", 4)]
    assert bench.sequences["warm"].num_cached_at_admission == 8


def test_waiting_counts_against_a_cached_prefix() -> None:
    bench = Bench(32, replace(CONFIG, max_sequences=1))
    bench.add("x", unique_tokens("x", 9))
    bench.step()
    bench.add("cold", unique_tokens("c", 9))
    bench.now = 9 / CACHED_TOKENS_PER_SECOND  # worth one more token than the cached 8
    bench.add("warm", unique_tokens("x", 12))
    bench.finish("x")
    assert bench.step() == [("cold", 9)]


def test_only_requests_in_the_admission_window_are_looked_up_again() -> None:
    bench = Bench(32, replace(CONFIG, max_sequences=1, admission_window=1))
    bench.add("x", unique_tokens("x", 9))
    bench.add("cold", unique_tokens("c", 9))
    bench.add("warm", unique_tokens("x", 12))  # nothing is cached yet
    bench.step()
    bench.finish("x")
    assert bench.step() == [("cold", 9)]
    bench.finish("cold")
    bench.add("warmer", unique_tokens("x", 13))  # its cached prefix is known when it is added
    assert bench.step() == [("warmer", 5)]


def test_fully_cached_prompt_recomputes_its_last_block_in_a_private_block() -> None:
    bench = Bench(32)
    bench.add("x", unique_tokens("x", 8))
    bench.step()
    bench.finish("x")
    again = bench.add("y", unique_tokens("x", 8))
    assert bench.step() == [("y", 4)]
    assert again.block_ids[0] == 0
    assert again.block_ids[1] not in (0, 1)
    assert bench.pool.find_cached(again.block_keys) == [0, 1]
    bench.finish("y")
    bench.pool.check_integrity()
    assert bench.pool.counts.idle == 2


def test_request_that_does_not_fit_blocks_those_behind_it() -> None:
    bench = Bench(5)
    bench.add("a", unique_tokens("a", 8))
    bench.add("long", unique_tokens("l", 16))
    bench.add("short", unique_tokens("s", 1))
    assert bench.step() == [("a", 8)]
    assert bench.step() == [("a", 1)]
    bench.finish("a")
    assert bench.step() == [("long", 16)]


def test_watermark_applies_only_while_other_requests_run() -> None:
    bench = Bench(4, replace(CONFIG, watermark_blocks=2))
    bench.add("a", unique_tokens("a", 4))
    bench.add("b", unique_tokens("b", 8))
    assert bench.step() == [("a", 4)]
    bench.finish("a")
    bench.add("c", unique_tokens("c", 16))
    assert bench.step() == [("b", 8)]
    bench.finish("b")
    assert bench.step() == [("c", 16)]


def test_watermark_ends_when_the_last_running_request_is_exported() -> None:
    bench = Bench(4, replace(CONFIG, watermark_blocks=2, chunk_tokens=4))
    bench.add("p", unique_tokens("p", 8), Task.PREFILL)
    bench.step()
    bench.add("b", unique_tokens("b", 8))
    assert bench.step() == [("p", 4)]
    bench.scheduler.change_phase(bench.sequences["p"], Phase.EXPORTED)
    assert bench.step() == [("b", 4)]


def test_latest_request_is_preempted_and_resumes_with_its_tokens() -> None:
    bench = Bench(3)
    bench.add("a", unique_tokens("a", 3))
    bench.add("b", unique_tokens("b", 3))
    for _ in range(2):
        bench.step()
    assert bench.step() == [("a", 1)]  # both need a block, and one is left
    a, b = bench.sequences["a"], bench.sequences["b"]
    assert (b.phase, b.block_ids, b.num_computed_tokens) == (Phase.WAITING, (), 0)
    assert b.token_ids == [*unique_tokens("b", 3), 7, 7]
    assert bench.scheduler.num_preemptions == 1
    assert a.block_ids == (0, 2)
    bench.finish("a")
    # Its full block survived as a cached prefix; one token is left to compute.
    assert bench.step() == [("b", 1)]
    assert b.num_cached_at_admission == 0


def test_preempted_request_goes_before_a_longer_cached_prefix() -> None:
    bench = Bench(3)
    a = bench.add("a", unique_tokens("a", 3))
    bench.add("b", unique_tokens("b", 3))
    for _ in range(7):
        bench.step()  # b is preempted, and then its cached block is reused by a
    bench.finish("a")
    bench.add("warm", [*a.token_ids[:8], 1])
    assert bench.step() == [("b", 5)]


def test_prompt_that_is_being_exported_is_not_preempted() -> None:
    bench = Bench(3)
    bench.add("whole", unique_tokens("w", 4))
    bench.add("prefill", unique_tokens("p", 8), Task.PREFILL)
    plan = bench.schedule()
    assert [row.request_id for row in plan.rows] == ["whole", "prefill"]
    whole, prefill = bench.sequences["whole"], bench.sequences["prefill"]
    whole.num_computed_tokens = 4
    prefill.num_computed_tokens = 4
    for sequence in (whole, prefill):
        bench.scheduler.seal_computed(sequence)
    whole.append_token(TokenId(7))
    # The answer needs another block, and the only request that may be preempted is its own.
    assert bench.step() == [("prefill", 4)]
    assert (whole.phase, prefill.phase) == (Phase.WAITING, Phase.RUNNING)


def test_exported_blocks_stall_the_queue_until_their_release() -> None:
    bench = Bench(2)
    bench.add("p", unique_tokens("p", 8), Task.PREFILL)
    bench.step()
    bench.scheduler.change_phase(bench.sequences["p"], Phase.EXPORTED)
    bench.add("a", unique_tokens("a", 3))
    assert bench.scheduler.has_work
    assert bench.step() == []
    assert not bench.scheduler.has_work
    bench.finish("p")
    assert bench.scheduler.has_work
    assert bench.step() == [("a", 3)]


def test_request_that_preempts_itself_waits_until_blocks_are_free() -> None:
    bench = Bench(4)
    bench.add("p", unique_tokens("p", 8), Task.PREFILL)
    bench.step()
    bench.scheduler.change_phase(bench.sequences["p"], Phase.EXPORTED)
    bench.add("a", unique_tokens("a", 8))
    bench.step()
    bench.add("b", unique_tokens("b", 3))
    assert bench.step() == []  # a needs a third block, and there is none
    assert bench.scheduler.has_work
    assert bench.step() == []  # a is first in the queue, and does not fit
    assert not bench.scheduler.has_work
    bench.finish("a")
    assert bench.step() == [("b", 3)]


def test_queue_continues_when_its_blocked_head_is_finished() -> None:
    bench = Bench(5)
    bench.add("a", unique_tokens("a", 8))
    bench.step()
    bench.add("long", unique_tokens("l", 16))
    bench.add("short", unique_tokens("s", 3))
    assert bench.step() == [("a", 1)]
    bench.finish("long")
    assert bench.step() == [("a", 1), ("short", 3)]


def test_blocked_queue_and_reservations_alternate() -> None:
    bench = Bench(6)
    bench.add("a", unique_tokens("a", 8))
    bench.step()
    bench.add("long", unique_tokens("l", 16))
    assert bench.step() == [("a", 1)]  # long is blocked; 3 blocks are free
    assert bench.reserve("r1", unique_tokens("1", 4)) is not None
    assert bench.reserve("r2", unique_tokens("2", 4)) is None  # the queue goes first
    bench.finish("a")
    bench.finish("r1")
    assert bench.reserve("r2", unique_tokens("2", 4)) is None
    assert bench.step() == [("long", 16)]
    assert bench.reserve("r2", unique_tokens("2", 4)) is not None


def test_reservation_takes_a_slot_and_reuses_cached_blocks() -> None:
    bench = Bench(8, replace(CONFIG, max_sequences=1))
    bench.add("x", unique_tokens("x", 8))
    bench.step()
    assert bench.reserve("early", unique_tokens("e", 4)) is None
    bench.finish("x")
    reserved = bench.reserve("r", unique_tokens("x", 11))
    assert reserved is not None
    assert (reserved.block_ids[:2], len(reserved.block_ids)) == ((0, 1), 3)
    assert reserved.num_sealed_blocks == 2
    bench.add("a", unique_tokens("a", 3))
    assert bench.step() == []
    bench.finish("r")
    assert bench.step() == [("a", 3)]


def test_phases_and_their_transitions() -> None:
    assert set(PHASE_TRANSITIONS) == set(Phase)
    bench = Bench(4)
    sequence = bench.add("a", [1, 2])
    with pytest.raises(AssertionError, match="a: waiting → exported"):
        sequence.set_phase(Phase.EXPORTED)


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_tokens", 0), ("max_sequences", 0), ("chunk_tokens", 17), ("watermark_blocks", -1)],
)
def test_invalid_setting_is_named(name: str, value: int) -> None:
    with pytest.raises(Invalid, match=f"{name} is {value}, and must be at") as caught:
        replace(CONFIG, **{name: value})
    assert caught.value.param == name
