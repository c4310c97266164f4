"""Traces in a storm: whatever dies, freezes, drains or comes back, what is told of a request is one
tree. Production code of router, conductors and workers over the network of ``tests/sim/whole``."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from prometheus_client import CollectorRegistry

from baton.core.trace_context import TraceContext
from baton.obs.span import MemorySpanSink, Span
from baton.worker.telemetry import WorkerTelemetry as WorkerWitness
from baton.worker.worker import Worker
from conductor.conductor import Conductor
from conductor.metrics import ConductorMetrics
from conductor.telemetry import ConductorTelemetry as ConductorWitness
from router.generation.record import GenerationRecord
from router.telemetry.tracing import RequestTrace, build_request_spans
from tests.sim.whole.loop import SimLoop
from tests.sim.whole.run import Run, simulated

NUM_SEEDS = 24


class Watcher:
    """All processes tell one: what dies has told what it had told."""

    def __init__(self) -> None:
        self.spans = MemorySpanSink()
        self.traces: dict[str, RequestTrace] = {}
        self._num_lives = 0

    def _next_life(self) -> str:
        self._num_lives += 1
        return f"life{self._num_lives}"

    def worker(self, *given: Any, **named: Any) -> Worker:
        clock = given[11]
        witness = WorkerWitness(self._next_life(), CollectorRegistry(), clock, self.spans)
        return Worker(*given, **{**named, "witness": witness})

    def conductor(self, membership: Any, mirror: Any, clock: Any, config: Any) -> ConductorWitness:
        core = Conductor(membership, mirror, clock, config)
        metrics = ConductorMetrics(CollectorRegistry())
        return ConductorWitness(core, metrics, clock, self._next_life(), self.spans)

    def record(self, request_id: Any, arrived_at: float, num_tokens: int) -> GenerationRecord:
        record = GenerationRecord(request_id, arrived_at, num_tokens)
        root = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", f"{len(self.traces) + 1:016x}")
        trace = self.traces[request_id] = RequestTrace(root, "", request_id, arrived_at)
        trace.follow([record], arrived_at)
        return record

    @contextmanager
    def looking(self) -> Iterator[None]:
        with (
            simulated(),
            patch("tests.sim.whole.worker.Worker", self.worker),
            patch("tests.sim.whole.conductor.Conductor", self.conductor),
            patch("tests.sim.whole.router.GenerationRecord", self.record),
        ):
            yield


def orphans(spans: list[Span]) -> list[str]:
    known = {span.context.span_id for span in spans}
    return [span.name for span in spans if span.parent_id and span.parent_id not in known]


def told(seed: int) -> list[Span]:
    """All spans of one run."""
    watcher, loop = Watcher(), SimLoop()  # type: ignore[abstract]

    async def main() -> None:
        await Run(seed, loop).main()

    with watcher.looking():
        loop.run(main())
    spans = list(watcher.spans.spans)
    for trace in watcher.traces.values():
        spans += build_request_spans(trace, "sim", 200, loop.time())
    return spans


def test_no_storm_makes_an_orphan() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        spans = told(seed)
        assert orphans(spans) == [], f"seed {seed}"
        ids = Counter(span.context.span_id for span in spans)
        assert max(ids.values()) == 1, f"seed {seed}: {ids.most_common(1)}"
        assert all(span.begin_seconds <= span.end_seconds for span in spans), f"seed {seed}"
        seen.update(span.name for span in spans)
        seen["failed"] += sum(span.name == "attempt" and bool(span.error) for span in spans)
    # The storms were some: placements failed, and every kind of stage was seen.
    assert seen["failed"] > 10 and seen["attempt"] > seen["request"]
    kinds = ("decide", "prefill job", "decode job", "whole job", "pull", "hand-off", "store fetch")
    assert all(seen[kind] for kind in kinds), seen
