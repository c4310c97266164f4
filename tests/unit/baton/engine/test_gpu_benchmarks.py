"""Tests the parts of the GPU benchmarks that can run without a GPU."""

from itertools import count

from baton.clock import SystemClock
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from benchmarks.gpu.cluster import means_between
from benchmarks.gpu.engine_load import serve
from testkit.fakes.runner import FakeRunner


def test_requests_are_served_from_their_arrival_on() -> None:
    """The clock advances by 0.1 s with each look at it. The first second is not measured."""
    engine = Engine(
        FakeRunner(64, 4),
        EngineConfig(block_tokens=4, max_model_tokens=64, vocab_size=256),
        model_digest=b"fake",
        kv_dtype="fake",
        eos_token_ids=frozenset(),
        clock=SystemClock(),
    )
    sampling = SamplingParams(3, temperature=0.0)
    specs = [
        RequestSpec(
            RequestId(str(number)),
            Epoch(1),
            (TokenId(number), *map(TokenId, range(4))),
            5,
            sampling,
        )
        for number in range(3)
    ]
    ticks = count()
    run = serve(engine, specs, [0.0, 1.0, 2.0], lambda: next(ticks) / 10)
    assert len(run.ttft_seconds) == 2
    assert len(run.itl_seconds) == 3 * 2
    assert sum(not work.is_decode for work in run.works) == 3
    assert "TTFT p50/p99" in run.summary()


def test_means_are_those_of_the_time_between_two_scrapes() -> None:
    step = "baton_worker_step_seconds"
    before = {(step, "decode"): (10.0, 1.0), (step, "mixed"): (2.0, 1.0)}
    after = {(step, "decode"): (14.0, 1.02), (step, "mixed"): (2.0, 1.0)}
    placement = {("baton_placement_seconds", ""): (2.0, 0.006)}
    assert (
        means_between(before, after | placement) == "step decode 5.0 ms (4), placement 3.0 ms (2)"
    )
