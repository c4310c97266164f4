"""Measure what observability costs: metrics per engine step, spans per request.

    python -m benchmarks.observability

Runs in one process with a fake model, and measures the thread's CPU seconds, on which other load
has little effect. First compares the time to record a step's telemetry with the time of the step
itself (most of which is the fake model's arithmetic). Then measures how much a request's spans cost
the event loops of a router and of a worker when the request is traced, when it was not sampled, and
when tracing is off.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import typer
from prometheus_client import CollectorRegistry

from baton.clock import SystemClock
from baton.core.ids import Epoch, Incarnation, RequestId, TokenId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.placement import Placement
from baton.core.request import RequestOutput, RequestSpec, SamplingParams
from baton.core.task import Task
from baton.core.trace_context import TraceContext
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.fake_runner import FakeRunner
from baton.engine.result import StepResult
from baton.obs.logs import configure_logging
from baton.obs.otlp_sink import OtlpSpanSink
from baton.worker.job import Job, JobOutcome
from baton.worker.job_table import JobTable
from baton.worker.output_stream import OutputStream
from baton.worker.telemetry import WorkerTelemetry
from router.generation.record import GenerationRecord
from router.telemetry.tracing import RequestTrace, RequestTracer, build_request_spans
from tools.otlp_collector import run_collector

CLOCK = SystemClock()
ROOT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
REQUEST_ID = "cmpl-beef12d327585831b9dae99f139abd59"
PROMPT_TOKENS = 32


def engine_with(batch: int, answer_tokens: int) -> Engine:
    """Return an engine that is decoding a batch of ``batch`` answers."""
    length = PROMPT_TOKENS + answer_tokens
    config = EngineConfig(
        block_tokens=16, max_model_tokens=length + 1, max_sequences=batch, max_batched_tokens=4096
    )
    runner = FakeRunner(batch * (length // 16 + 2), 16)
    engine = Engine(
        runner, config, model_digest=b"m", kv_dtype="fake", eos_token_ids=frozenset(), clock=CLOCK
    )
    for number in range(batch):
        tokens = tuple(TokenId(number * 7 + index) for index in range(PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=answer_tokens, temperature=0.0)
        spec = RequestSpec(RequestId(str(number)), Epoch(1), tokens, PROMPT_TOKENS, sampling)
        engine.add(spec, Task.PREFILL_AND_DECODE)
    return engine


def step_seconds(batch: int, steps: int) -> tuple[float, float]:
    """Return the median time of a step alone, and of recording its telemetry, in seconds."""
    engine = engine_with(batch, steps + 8)
    telemetry = WorkerTelemetry("w", CollectorRegistry(), CLOCK)
    engine.step()
    alone: list[float] = []
    telemetry_seconds: list[float] = []
    for _ in range(steps):
        began = time.thread_time()
        result = engine.step()
        stepped = time.thread_time()
        telemetry.record_step(result, JobTable())
        telemetry_seconds.append(time.thread_time() - stepped)
        alone.append(stepped - began)
    return statistics.median(alone), statistics.median(telemetry_seconds)


def per_call(work: Callable[[], object], times: int) -> float:
    """Return the seconds per call: the median over batches of a hundred calls each."""
    batches = []
    for _ in range(max(times // 100, 1)):
        began = time.thread_time()
        for _ in range(100):
            work()
        batches.append((time.thread_time() - began) / 100)
    return statistics.median(batches)


def finished_record() -> tuple[RequestTrace, GenerationRecord]:
    record = GenerationRecord(RequestId("cmpl-1"), 0.0, PROMPT_TOKENS)
    trace = RequestTrace(ROOT, "", "cmpl-1", 0.0)
    trace.set_records([record], 0.001)
    worker = WorkerRef(WorkerId("d"), "d:1", Incarnation(1))
    record.record_query(Epoch(1), 0.001)
    record.record_placement(Epoch(1), Placement(worker, worker, "why", policy="baton"), 0.002)
    record.record_output(RequestOutput(RequestId("cmpl-1"), Epoch(1), 0, (TokenId(1),)), 0.1)
    record.record_end("stop", 0.5)
    return trace, record


def record_without_tracing(record: GenerationRecord) -> None:
    """Do what the router does for a request when tracing is off."""
    record.record_query(Epoch(1), CLOCK.monotonic())


def worker_job(traced: bool) -> RequestSpec:
    sampling = SamplingParams(max_tokens=4)
    return RequestSpec(
        RequestId("r/1"), Epoch(1), (TokenId(1),) * PROMPT_TOKENS, PROMPT_TOKENS, sampling,
        trace=ROOT.traceparent if traced else "",
    )  # fmt: skip


def record_whole_request(
    telemetry: WorkerTelemetry, spec: RequestSpec, stream: OutputStream
) -> None:
    """Record a worker's telemetry of a request that went through all stages."""
    job = Job(RequestId("r"), spec, Task.PREFILL_AND_DECODE, stream)
    telemetry.record_started(job)
    telemetry.record_step(StepResult(), JobTable())
    telemetry.record_ended(job, JobOutcome.DONE)


async def span_microseconds(times: int) -> dict[str, float]:
    """Measure how many microseconds of the event loop's time the tracing of a request takes, in a
    router and in a worker."""
    with run_collector() as (_, url):
        spans = OtlpSpanSink(url, {"service.name": "bench"}, CLOCK)
        trace, _ = finished_record()
        stream = OutputStream(lambda *_: None, lambda *_: None, lambda _: None)
        on = WorkerTelemetry("w", CollectorRegistry(), CLOCK, spans)
        off = WorkerTelemetry("w", CollectorRegistry(), CLOCK)
        none_chosen = RequestTracer(spans, 0.0, CLOCK)
        seconds = {
            "router_not_sampled": per_call(lambda: none_chosen.begin(REQUEST_ID, None), times),
            "router_off": per_call(lambda: record_without_tracing(trace.records[0]), times),
            "router_traced": per_call(
                lambda: spans.emit(build_request_spans(trace, "chat", 200, 0.6)), times
            ),
            "worker_traced": per_call(
                partial(record_whole_request, on, worker_job(True), stream), times
            ),
            "worker_not_sampled": per_call(
                partial(record_whole_request, on, worker_job(False), stream), times
            ),
            "worker_off": per_call(
                partial(record_whole_request, off, worker_job(False), stream), times
            ),
        }
        await asyncio.to_thread(spans.close)
    return {name: value * 1e6 for name, value in seconds.items()}


def main(batches: Sequence[int] = (1, 16, 64), steps: int = 2000, requests: int = 2000) -> None:
    result: dict[str, object] = {"steps": steps}
    for batch in batches:
        step, metrics = step_seconds(batch, steps)
        print(
            f"batch {batch:3}: a step {step * 1e6:7.1f} µs of Python, "
            f"metrics {metrics * 1e6:5.2f} µs"
        )
        result[f"batch_{batch}"] = {"step_us": step * 1e6, "metrics_us": metrics * 1e6}
    configure_logging("warning", "json")
    spans = asyncio.run(span_microseconds(requests))
    for name, value in spans.items():
        print(f"{name:20} {value:7.1f} µs per request")
    print(json.dumps(result | {"spans_us": spans}))


if __name__ == "__main__":
    typer.run(main)
