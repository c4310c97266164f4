"""Tests that the spans of a request form one tree, even if processes die, freeze, drain or restart.
The production code of router, conductors and workers runs over the simulated network of
``tests/sim/whole``."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from prometheus_client import CollectorRegistry

from baton.core.trace_context import TraceContext
from baton.obs.span import Span
from baton.worker.telemetry import WorkerTelemetry
from conductor.metrics import ConductorMetrics
from conductor.model_conductors import ModelConductors
from conductor.telemetry import ConductorTelemetry
from router.generation.record import GenerationRecord
from router.telemetry.tracing import RequestTrace, build_request_spans
from testkit.fakes.span_sink import MemorySpanSink
from tests.sim.whole.loop import SimLoop
from tests.sim.whole.run import Run, simulation_environment

NUM_SEEDS = 24


class SpanCollector:
    """Collects the spans of all processes in a run, including those of processes that die."""

    def __init__(self) -> None:
        self.spans = MemorySpanSink()
        self.traces: dict[str, RequestTrace] = {}
        self._num_processes = 0

    def _next_process_name(self) -> str:
        self._num_processes += 1
        return f"process{self._num_processes}"

    def worker_telemetry(self, clock: Any) -> WorkerTelemetry:
        name = self._next_process_name()
        return WorkerTelemetry(name, CollectorRegistry(), clock, self.spans)

    def conductor(
        self, membership: Any, mirror: Any, clock: Any, config: Any
    ) -> ConductorTelemetry:
        core = ModelConductors(membership, mirror, clock, config)
        metrics = ConductorMetrics(CollectorRegistry(), "baton")
        return ConductorTelemetry(core, metrics, clock, self._next_process_name(), self.spans)

    def record(self, request_id: Any, arrived_at: float, num_tokens: int) -> GenerationRecord:
        record = GenerationRecord(request_id, arrived_at, num_tokens)
        root = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", f"{len(self.traces) + 1:016x}")
        trace = self.traces[request_id] = RequestTrace(root, "", request_id, arrived_at)
        trace.set_records([record], arrived_at)
        return record

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Make simulated processes report their spans to this collector."""
        with (
            simulation_environment(),
            patch("tests.sim.whole.worker.telemetry_for", self.worker_telemetry),
            patch("tests.sim.whole.conductor.ModelConductors", self.conductor),
            patch("tests.sim.whole.router.GenerationRecord", self.record),
        ):
            yield


def orphans(spans: list[Span]) -> list[str]:
    known = {span.context.span_id for span in spans}
    return [span.name for span in spans if span.parent_id and span.parent_id not in known]


def run_and_collect_spans(seed: int) -> list[Span]:
    collector, loop = SpanCollector(), SimLoop()  # type: ignore[abstract]

    async def main() -> None:
        await Run(seed, loop).main()

    with collector.patched():
        loop.run(main())
    spans = list(collector.spans.spans)
    for trace in collector.traces.values():
        spans += build_request_spans(trace, "sim", 200, loop.time())
    return spans


def test_no_fault_leaves_an_orphaned_span() -> None:
    num_spans: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        spans = run_and_collect_spans(seed)
        assert orphans(spans) == [], f"seed {seed}"
        ids = Counter(span.context.span_id for span in spans)
        assert max(ids.values()) == 1, f"seed {seed}: {ids.most_common(1)}"
        assert all(span.begin_seconds <= span.end_seconds for span in spans), f"seed {seed}"
        num_spans.update(span.name for span in spans)
        num_spans["failed"] += sum(span.name == "attempt" and bool(span.error) for span in spans)
    # The faults had an effect: placements failed, and spans of every kind were recorded.
    assert num_spans["failed"] > 10 and num_spans["attempt"] > num_spans["request"]
    kinds = (
        "decide",
        "prefill job",
        "decode job",
        "whole job",
        "kv import",
        "kv export",
        "store fetch",
    )
    assert all(num_spans[kind] for kind in kinds), num_spans
