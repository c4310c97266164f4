"""Tests which requests an engine refuses, what it reports, and how it checks its own integrity."""

from dataclasses import replace

import pytest

from baton.clock import ManualClock
from baton.core.ids import BlockId
from baton.core.request import RequestSpec
from baton.core.task import Task
from baton.engine.engine import Engine
from baton.errors import Invalid, Overloaded
from testkit.fakes.runner import FakeRunner, reference_answer
from tests.unit.baton.engine.test_engine import CONFIG, PROMPT, Bench, spec, tokens_of


@pytest.mark.parametrize(
    ("request_spec", "message"),
    [
        (spec("a", ()), "num_prompt_tokens is 0"),
        (spec("a", max_tokens=0), "there is nothing left to generate"),
        (spec("a", emitted=5), "there is nothing left to generate"),
        (
            spec("a", max_tokens=55),
            "This model's maximum context length is 64 tokens. However, the request has 10 tokens "
            "and may generate 55",
        ),
        (spec("a", max_tokens=36), "the request needs 12 KV blocks, but the worker has only 11"),
    ],
)
def test_request_that_can_never_be_served_is_refused(
    request_spec: RequestSpec, message: str
) -> None:
    bench = Bench(num_blocks=11)
    with pytest.raises(Invalid, match=message):
        bench.engine.add(request_spec, Task.PREFILL_AND_DECODE)
    with pytest.raises(Invalid, match=message):
        bench.engine.reserve_blocks(request_spec)


def test_largest_request_that_fits_is_served() -> None:
    bench = Bench(num_blocks=11)
    bench.engine.add(spec("a", max_tokens=35), Task.PREFILL_AND_DECODE)
    assert tokens_of(bench.run(), "a") == reference_answer(spec("a", max_tokens=35))[0]


def test_prefill_only_request_needs_no_room_for_its_answer() -> None:
    bench = Bench(num_blocks=3)
    bench.engine.add(spec("a", max_tokens=54), Task.PREFILL)
    assert len(bench.run()) == 1


def test_duplicate_request_id_is_rejected() -> None:
    bench = Bench()
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    with pytest.raises(Invalid, match="request id a is already in use"):
        bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    with pytest.raises(Invalid, match="request id a is already in use"):
        bench.engine.reserve_blocks(spec("a"))


def test_full_queue_raises_overloaded() -> None:
    bench = Bench(config=replace(CONFIG, max_waiting=1))
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    with pytest.raises(Overloaded, match="queue is full: 1 requests are waiting"):
        bench.engine.add(spec("b"), Task.PREFILL_AND_DECODE)
    bench.engine.step()
    bench.engine.add(spec("b"), Task.PREFILL_AND_DECODE)


def test_engine_and_runner_agree_on_the_block_size() -> None:
    with pytest.raises(Invalid, match="block_tokens is 4; it must be the runner's block size, 8"):
        Engine(
            FakeRunner(4, 8),
            CONFIG,
            model_digest=b"",
            kv_dtype="float32",
            eos_token_ids=frozenset(),
            clock=ManualClock(),
        )


def test_queued_tokens_count_uncomputed_prompt_tokens() -> None:
    bench = Bench(config=replace(CONFIG, max_sequences=2))
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    bench.engine.step()
    bench.engine.add(spec("b", PROMPT[::-1] * 3), Task.PREFILL_AND_DECODE)
    bench.engine.add(spec("c", PROMPT[::-1]), Task.PREFILL_AND_DECODE)
    bench.engine.step()  # a decodes, b computes 15 of 30, c waits
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting, stats.queued_tokens) == (2, 1, 25)


def test_check_integrity_notices_a_lost_reference() -> None:
    bench = Bench()
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    bench.engine.step()
    bench.engine.check_integrity()
    bench.engine._pool.reference([BlockId(0)])
    with pytest.raises(AssertionError, match="block 0: 1 owners, 2 references"):
        bench.engine.check_integrity()


def test_describe_draws_the_pool_and_the_requests() -> None:
    bench = Bench(num_blocks=4)
    bench.engine.add(spec("a"), Task.PREFILL_AND_DECODE)
    bench.engine.step()
    assert bench.engine.describe().splitlines() == [
        "4 blocks: 1 free 1 filling 2 referenced 0 idle 0 quarantined",
        ".=free f=filling #=referenced i=idle q=quarantined",
        "      0 ##f.",
        "a whole running arrival=1 tokens=10/11 blocks=[0, 1, 2]",
    ]
