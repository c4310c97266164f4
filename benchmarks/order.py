"""Compare prefill orders in one worker, with mixed short and very long prompts, in virtual time.

    python -m benchmarks.order [--seeds N] [--json]

The engine is the production one, with a runner that computes nothing and takes as long as a GPU
would: 20,000 tokens a second, and 1.5 times as long per token for a prompt of 70,000 tokens.
Arrivals are Poisson; one prompt in twenty has 30,000 to 100,000 tokens, and these prompts are two
thirds of the work. A request meets the SLO when its TTFT is within 2 s plus the prompt's own
prefill time. Two tenants send the same mix, one of them four times as often. ``fair`` is Jain's
index of the tenants' computed tokens, each divided by the tenant's max-min fair share: 1 is fair.
Only tokens that are computed while requests still arrive are counted.

A second table has the TTFT of a quiet tenant, four requests of 200 tokens a second, alone and
beside a tenant of 48 clients, each of which sends a prompt of 970 tokens as soon as its last one is
computed; steps have 512 tokens. ``total`` is the number of tokens computed per second for both
tenants, divided by that without the quiet one. The rows ``simulator`` have the same load on the
simulator's prefill worker.

A third table has a closed loop of 32 clients whose prompts of 512 tokens take longer than the SLO
allows, beside their answers in a mixed worker, and alone in a prefill worker.

Prints a table per load, and JSON as the last line; with ``--json``, only the JSON line. All figures
except the measured run time are the same in every run.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np

from baton.clock import ManualClock
from baton.core.cost import PrefillCost
from baton.core.ids import Epoch, RequestId, TokenId, WorkerId
from baton.core.prefill_order import PREFILL_ORDERS, WaitingPrompt
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.plan import Plan, SampledToken, StepOutput
from baton.traces.trace import TraceRequest
from simulator.event_queue import EventQueue
from simulator.prefill import SimulatedPrefillWorker
from simulator.request import SimulatedRequest
from testkit.fakes.runner import FakeRunner
from testkit.machine import describe

STEP_SECONDS = 0.004
TOKEN_SECONDS = 50e-6
PAIR_SECONDS = 0.7e-9
STEP_TOKENS = 2048
BLOCK_TOKENS = 64
NUM_BLOCKS = 16_384
FIRST_TOKEN_SECONDS = 2.0
HORIZON_SECONDS = 400.0
LONG_SHARE = 0.05
HEAVY_SHARE = 0.8
"""The share of requests by the tenant that sends four times as many."""

QUIET_TOKENS, QUIET_RPS = 200, 4.0
FLOOD_TOKENS, FLOOD_CLIENTS = 970, 48
FLOOD_STEP_TOKENS = 512
FLOOD_SECONDS = 60.0

CLIENTS, CLOSED_REQUESTS = 32, (64, 640)
CLOSED_TOKENS, CLOSED_ANSWER_TOKENS = 512, 64
CLOSED_STEP_SECONDS, CLOSED_TOKEN_SECONDS, CLOSED_ANSWER_ROW_SECONDS = 0.012, 330e-6, 0.5e-3
CLOSED_ANSWER_SECONDS = 1.3
CLOSED_ITL_SECONDS = 0.05

LOADS = (0.7, 0.9, 1.1)
TENANTS = (b"heavy", b"light")
SPEC_TOKENS = tuple(TokenId(i) for i in range(100_000))


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    number: int
    at_seconds: float
    num_tokens: int
    tenant: bytes

    @property
    def own_seconds(self) -> float:
        return prefill_seconds(0, self.num_tokens)


@dataclass(frozen=True, slots=True)
class PrefillOrderRow:
    """The result of one prefill order under one load, over all seeds.

    ``attained`` is the fraction of requests that met the SLO. ``attained_long`` is that fraction
    for the very long prompts, ``attained_light`` for the tenant that sends fewer requests, and
    ``attained_worst_quartile`` for the quartile of prompt lengths in which it is lowest. ``p50``,
    ``p90`` and ``p99`` are TTFTs, ``longest_wait`` is the longest TTFT minus the prompt's own
    prefill time; all four are in seconds. ``fair`` is Jain's index."""

    order: str
    fairness: bool
    load: float
    attained: float
    attained_long: float
    attained_worst_quartile: float
    attained_light: float
    p50: float
    p90: float
    p99: float
    longest_wait: float
    fair: float


@dataclass(frozen=True, slots=True)
class QuietRow:
    """The quiet tenant's TTFT in seconds, alone and beside the flood, over all seeds, and the total
    throughput relative to that without the quiet tenant. ``worker`` is "engine" or "simulator"."""

    worker: str
    order: str
    fairness: bool
    alone_p50: float
    alone_p99: float
    p50: float
    p99: float
    total: float


def prefill_seconds(start: int, end: int) -> float:
    """Return the prefill time of a prompt's tokens [start, end), in steps that contain no other
    request's tokens."""
    count = end - start
    num_steps = -(-count // STEP_TOKENS)
    attended = count * start + count * (count + 1) / 2
    return STEP_SECONDS * num_steps + TOKEN_SECONDS * count + PAIR_SECONDS * attended


class IdleRunner(FakeRunner):
    """Checks every plan, computes nothing, and advances the clock by the time that computing would
    take."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_TOKENS)
        self._clock = clock

    def run(self, plan: Plan) -> StepOutput:
        self._check(plan)
        seconds = STEP_SECONDS
        for row in plan.rows:
            count = row.num_tokens
            attended = count * row.start + count * (count + 1) / 2
            seconds += TOKEN_SECONDS * count + PAIR_SECONDS * attended
        self._clock.advance(seconds)
        return StepOutput(tuple(SampledToken(TokenId(7)) if r.sample else None for r in plan.rows))


def workload(seed: int, load: float) -> list[PrefillRequest]:
    """Generate the requests that arrive within HORIZON_SECONDS. On average, prefilling them takes
    the share ``load`` of that time. If ``load`` is above 1, more requests arrive than the worker
    can compute."""
    chance = np.random.default_rng(seed)
    lengths = np.exp(chance.normal(math.log(1200), 0.8, 100_000)).clip(64, 8000).astype(int)
    is_long = chance.random(100_000) < LONG_SHARE
    lengths[is_long] = chance.integers(30_000, 100_000, int(is_long.sum()))
    mean = statistics.fmean(prefill_seconds(0, int(n)) for n in lengths[:5000])
    times = np.cumsum(chance.exponential(mean / load, 100_000))
    heavy = chance.random(100_000) < HEAVY_SHARE
    count = int(np.searchsorted(times, HORIZON_SECONDS))
    return [
        PrefillRequest(i, float(times[i]), int(lengths[i]), TENANTS[0 if heavy[i] else 1])
        for i in range(count)
    ]


@dataclass(slots=True)
class Replay:
    """One engine and its results: the TTFT of each request, and the number of tokens computed for
    each tenant in the first ``HORIZON_SECONDS``."""

    asks: list[PrefillRequest]
    clock: ManualClock
    engine: Engine
    resend_until_seconds: float = 0.0
    """Until then, the heavy tenant sends a prompt whenever one of its prompts is computed."""
    ttft: dict[int, float] = field(default_factory=dict)
    given: dict[bytes, int] = field(default_factory=lambda: dict.fromkeys(TENANTS, 0))
    computed: dict[int, int] = field(default_factory=dict)
    coming: list[PrefillRequest] = field(default_factory=list)
    """The requests that have not arrived yet, the next one last."""

    @property
    def tokens_per_second(self) -> float:
        return sum(ask.num_tokens for ask in self.asks) / self.clock.monotonic()

    def run(self) -> None:
        self.coming = coming = list(reversed(self.asks))
        while coming or self.engine.has_work():
            if not self.engine.has_work():
                self.clock.advance(max(0.0, coming[-1].at_seconds - self.clock.monotonic()))
            while coming and coming[-1].at_seconds <= self.clock.monotonic():
                self.engine.add(_spec(coming.pop()), Task.PREFILL)
            self._step()

    def _step(self) -> None:
        in_time = self.clock.monotonic() < HORIZON_SECONDS
        result = self.engine.step()
        for progress in result.progress:
            number, computed = int(progress.request_id), progress.num_computed_tokens
            if in_time:
                new = computed - self.computed.get(number, 0)
                self.given[self.asks[number].tenant] += new
            self.computed[number] = computed
        for output in result.outputs:
            number = int(output.request_id)
            self.ttft[number] = self.clock.monotonic() - self.asks[number].at_seconds
            self.engine.release_export(output.request_id)
            self._resend(self.asks[number])

    def _resend(self, ask: PrefillRequest) -> None:
        now = self.clock.monotonic()
        if ask.tenant == TENANTS[0] and now < self.resend_until_seconds:
            self.asks.append(PrefillRequest(len(self.asks), now, ask.num_tokens, ask.tenant))
            self.coming.append(self.asks[-1])


def replay(
    asks: Sequence[PrefillRequest],
    order: str,
    fairness: bool,
    step_tokens: int = STEP_TOKENS,
    resend_until_seconds: float = 0.0,
) -> Replay:
    clock = ManualClock()
    config = EngineConfig(
        block_tokens=BLOCK_TOKENS, max_model_tokens=200_000, max_batched_tokens=step_tokens,
        max_waiting=100_000, max_sequences=256, order=order, fairness=fairness,
    )  # fmt: skip
    engine = Engine(
        IdleRunner(clock), config, model_digest=b"", kv_dtype="none",
        eos_token_ids=frozenset(), clock=clock,
    )  # fmt: skip
    done = Replay(list(asks), clock, engine, resend_until_seconds)
    done.run()
    assert len(done.ttft) == len(done.asks), "a request was not served"
    return done


def _spec(ask: PrefillRequest) -> RequestSpec:
    tokens = (TokenId(ask.number), *SPEC_TOKENS[1 : ask.num_tokens])
    return RequestSpec(
        RequestId(str(ask.number)), Epoch(1), tokens, len(tokens), SamplingParams(max_tokens=2),
        tenant_salt=ask.tenant, ttft_slo_seconds=FIRST_TOKEN_SECONDS,
    )  # fmt: skip


def _fairness(asks: Sequence[PrefillRequest], given: dict[bytes, int]) -> float:
    """Return Jain's index of each tenant's tokens relative to its max-min share."""
    wanted = {tenant: sum(a.num_tokens for a in asks if a.tenant == tenant) for tenant in TENANTS}
    total, least = sum(given.values()), min(wanted.values())
    small = min(least, total / 2)
    shares = {t: small if wanted[t] == least else total - small for t in TENANTS}
    parts = [given[tenant] / shares[tenant] for tenant in TENANTS]
    return sum(parts) ** 2 / (len(parts) * sum(part * part for part in parts))


def measure(order: str, fairness: bool, load: float, num_seeds: int) -> PrefillOrderRow:
    done: list[tuple[PrefillRequest, float]] = []
    fair = []
    for seed in range(num_seeds):
        asks = workload(seed, load)
        result = replay(asks, order, fairness)
        done += [(ask, result.ttft[ask.number]) for ask in asks]
        fair.append(_fairness(asks, result.given))
    times = np.array([seconds for _, seconds in done])
    by_length = sorted(done, key=lambda pair: pair[0].num_tokens)
    size = -(-len(done) // 4)
    return PrefillOrderRow(
        order, fairness, load,
        attained=_attained(done),
        attained_long=_attained([pair for pair in done if pair[0].num_tokens >= 30_000]),
        attained_worst_quartile=min(
            _attained(by_length[i : i + size]) for i in range(0, len(done), size)
        ),
        attained_light=_attained([pair for pair in done if pair[0].tenant == TENANTS[1]]),
        p50=float(np.percentile(times, 50)),
        p90=float(np.percentile(times, 90)),
        p99=float(np.percentile(times, 99)),
        longest_wait=max(seconds - ask.own_seconds for ask, seconds in done),
        fair=statistics.fmean(fair),
    )  # fmt: skip


class SimulatedReplay:
    """The simulator's prefill worker under the load of the second table, and the TTFT of each
    request in seconds."""

    def __init__(self, asks: list[PrefillRequest], order: str) -> None:
        self.asks = asks
        self.ttft: dict[int, float] = {}
        self._events = EventQueue()
        self._worker = SimulatedPrefillWorker(
            WorkerId("p0"),
            self._events,
            PrefillCost(STEP_SECONDS, TOKEN_SECONDS, PAIR_SECONDS),
            PREFILL_ORDERS[order],
            step_tokens=FLOOD_STEP_TOKENS,
            capacity_tokens=NUM_BLOCKS * BLOCK_TOKENS,
            on_last_chunk=lambda job: None,
            on_done=self._finish,
        )
        for ask in asks:
            self._events.schedule(ask.at_seconds, partial(self._submit, ask))
        self._events.run(self._worker.check_integrity)

    @property
    def tokens_per_second(self) -> float:
        return sum(ask.num_tokens for ask in self.asks) / self._events.now_seconds

    def _submit(self, ask: PrefillRequest) -> None:
        deadline = ask.at_seconds + FIRST_TOKEN_SECONDS + ask.own_seconds
        waiting = WaitingPrompt(ask.at_seconds, deadline, tenant=ask.tenant)
        arrival = TraceRequest(ask.at_seconds, ask.num_tokens, 1, ())
        job = SimulatedRequest(ask.number, arrival, (), ask.own_seconds, deadline, waiting)
        job.ready_at_seconds = ask.at_seconds
        self._worker.submit(job)

    def _finish(self, job: SimulatedRequest) -> None:
        now, ask = self._events.now_seconds, self.asks[job.number]
        self.ttft[job.number] = now - ask.at_seconds
        if ask.tenant == TENANTS[0] and now < FLOOD_SECONDS:
            self.asks.append(replace(ask, number=len(self.asks), at_seconds=now))
            self._submit(self.asks[-1])
        self._events.schedule(now, partial(self._worker.release, job))


def measure_quiet(worker: str, order: str, fairness: bool, num_seeds: int) -> QuietRow:
    def run(*asks: PrefillRequest) -> Replay | SimulatedReplay:
        numbered = [replace(ask, number=i) for i, ask in enumerate(asks)]
        if worker == "simulator":
            return SimulatedReplay(numbered, order)
        return replay(numbered, order, fairness, FLOOD_STEP_TOKENS, FLOOD_SECONDS)

    def quiet_ttft(result: Replay | SimulatedReplay) -> list[float]:
        return [result.ttft[ask.number] for ask in result.asks if ask.tenant == TENANTS[1]]

    alone, beside, ratios = list[float](), list[float](), list[float]()
    flood = [PrefillRequest(0, 0.0, FLOOD_TOKENS, TENANTS[0])] * FLOOD_CLIENTS
    for seed in range(num_seeds):
        gaps = np.random.default_rng(seed).exponential(1 / QUIET_RPS, 1000)
        times = [float(time) for time in np.cumsum(gaps) if time < FLOOD_SECONDS]
        quiet = [PrefillRequest(0, time, QUIET_TOKENS, TENANTS[1]) for time in times]
        both = run(*flood, *quiet)
        alone += quiet_ttft(run(*quiet))
        beside += quiet_ttft(both)
        ratios.append(both.tokens_per_second / run(*flood).tokens_per_second)
    p50, p99 = (float(np.percentile(beside, q)) for q in (50, 99))
    alone_p50, alone_p99 = (float(np.percentile(alone, q)) for q in (50, 99))
    total = statistics.fmean(ratios)
    return QuietRow(worker, order, fairness, alone_p50, alone_p99, p50, p99, total)


@dataclass(frozen=True, slots=True)
class ClosedRow:
    """TTFTs in seconds of a closed loop: as soon as an answer ends, its client sends the next
    request. ``worker`` is "mixed", or "prefill": one whose answers are generated elsewhere, in
    ``CLOSED_ANSWER_SECONDS``. ``run`` is 1 for the first run of a worker, which has not measured
    its speed yet. ``in_time`` requests met the SLO; all took ``seconds``."""

    worker: str
    order: str
    run: int
    num_requests: int
    p50: float
    p90: float
    p99: float
    in_time: int
    seconds: float


class ClosedRunner(FakeRunner):
    """Computes nothing, and advances the clock like a small model on two processor cores."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_TOKENS)
        self._clock = clock

    def run(self, plan: Plan) -> StepOutput:
        self._check(plan)
        num_answers = sum(row.num_tokens == 1 for row in plan.rows)
        self._clock.advance(
            CLOSED_STEP_SECONDS
            + CLOSED_ANSWER_ROW_SECONDS * num_answers
            + CLOSED_TOKEN_SECONDS * (plan.num_tokens - num_answers)
        )
        return StepOutput(tuple(SampledToken(TokenId(7)) if r.sample else None for r in plan.rows))


class ClosedLoop:
    """One engine, and the clients of :class:`ClosedRow`."""

    def __init__(self, worker: str, order: str) -> None:
        self._task = Task.PREFILL_AND_DECODE if worker == "mixed" else Task.PREFILL
        self._clock = ManualClock()
        config = EngineConfig(
            block_tokens=BLOCK_TOKENS, max_model_tokens=8192, max_batched_tokens=512, order=order,
            target_inter_token_latency_seconds=CLOSED_ITL_SECONDS,
        )  # fmt: skip
        self._engine = Engine(
            ClosedRunner(self._clock), config, model_digest=b"", kv_dtype="none",
            eos_token_ids=frozenset(), clock=self._clock,
        )  # fmt: skip
        self._began_at: dict[RequestId, float] = {}
        self._ttft: list[float] = []
        self._returns_at: list[float] = []

    def run(self, num_requests: int) -> tuple[list[float], float]:
        """Return the TTFTs of ``num_requests`` requests, and the seconds that the run took."""
        began, last = self._clock.monotonic(), len(self._began_at) + num_requests
        self._ttft.clear()
        self._returns_at = [began] * CLIENTS
        while self._returns_at or self._engine.has_work():
            if not self._engine.has_work():
                self._clock.advance(max(0.0, min(self._returns_at) - self._clock.monotonic()))
            now = self._clock.monotonic()
            due = [at for at in self._returns_at if at <= now]
            self._returns_at = [at for at in self._returns_at if at > now]
            for _ in due[: last - len(self._began_at)]:
                self._add()
            if self._engine.has_work():
                self._step()
        return list(self._ttft), self._clock.monotonic() - began

    def measure_speed(self) -> None:
        """Compute one prompt alone, in steps enough for the engine to know its speed."""
        self._add(8 * CLOSED_TOKENS)
        while self._engine.has_work():
            self._step()

    def _add(self, num_tokens: int = CLOSED_TOKENS) -> None:
        number = len(self._began_at)
        tokens = (TokenId(number), *SPEC_TOKENS[1:num_tokens])
        sampling = SamplingParams(max_tokens=CLOSED_ANSWER_TOKENS, ignore_eos=True)
        spec = RequestSpec(
            RequestId(str(number)), Epoch(1), tokens, len(tokens), sampling,
            ttft_slo_seconds=FIRST_TOKEN_SECONDS,
        )  # fmt: skip
        self._began_at[spec.request_id] = self._clock.monotonic()
        self._engine.add(spec, self._task)

    def _step(self) -> None:
        outputs, now = self._engine.step().outputs, self._clock.monotonic()
        for output in outputs:
            if output.first_index == 0 and output.token_ids:
                self._ttft.append(now - self._began_at[output.request_id])
            if self._task is Task.PREFILL:
                self._engine.release_export(output.request_id)
                self._returns_at.append(now + CLOSED_ANSWER_SECONDS)
            elif output.finish_reason is not None:
                self._returns_at.append(now)


def measure_closed(worker: str, order: str, num_requests: int) -> Iterator[ClosedRow]:
    loop = ClosedLoop(worker, order)
    own = CLOSED_STEP_SECONDS + CLOSED_TOKEN_SECONDS * CLOSED_TOKENS
    for number in (1, 2):
        if number == 2:
            loop.measure_speed()
        times, seconds = loop.run(num_requests)
        p50, p90, p99 = (float(np.percentile(times, q)) for q in (50, 90, 99))
        in_time = sum(each <= FIRST_TOKEN_SECONDS + own for each in times)
        yield ClosedRow(worker, order, number, num_requests, p50, p90, p99, in_time, seconds)


def closed_table(rows: Sequence[ClosedRow]) -> Iterator[str]:
    yield "worker   order         run  requests    p50    p90    p99  in time  seconds"
    for row in rows:
        yield (
            f"{row.worker:7}  {row.order:12}  {row.run:3}  {row.num_requests:8}  {row.p50:5.2f}"
            f"  {row.p90:5.2f}  {row.p99:5.2f}  {row.in_time:7}  {row.seconds:7.1f}"
        )


def quiet_table(rows: Sequence[QuietRow]) -> Iterator[str]:
    yield "worker     order         tenants  alone p50     p99  beside p50     p99  total"
    for row in rows:
        yield (
            f"{row.worker:9}  {row.order:12}  {'vtc' if row.fairness else '-':7}"
            f"  {row.alone_p50:9.3f}"
            f"  {row.alone_p99:6.3f}  {row.p50:10.3f}  {row.p99:6.3f}  {row.total:5.3f}"
        )


def _attained(pairs: Sequence[tuple[PrefillRequest, float]]) -> float:
    met = sum(seconds <= FIRST_TOKEN_SECONDS + ask.own_seconds for ask, seconds in pairs)
    return met / max(len(pairs), 1)


HEADER = (
    "load  order         tenants  attained  long  worst ¼  light    p50    p90     p99  longest"
    "   fair"
)


def table(rows: Sequence[PrefillOrderRow]) -> Iterator[str]:
    yield HEADER
    for row in rows:
        yield (
            f"{row.load:4.1f}  {row.order:12}  {'vtc' if row.fairness else '-':7}"
            f"  {row.attained:8.3f}  {row.attained_long:4.2f}  {row.attained_worst_quartile:7.3f}"
            f"  {row.attained_light:5.3f}  {row.p50:5.2f}  {row.p90:5.1f}"
            f"  {row.p99:6.1f}  {row.longest_wait:7.1f}"
            f"  {row.fair:5.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Orders of prompts in one worker")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--orders", nargs="*", default=list(PREFILL_ORDERS), choices=list(PREFILL_ORDERS)
    )
    parser.add_argument("--loads", nargs="*", type=float, default=list(LOADS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.json:
        print(describe(), f"seeds 0..{options.seeds - 1}, {HORIZON_SECONDS:g} s each")
    rows = [
        measure(order, fairness, load, options.seeds)
        for load in options.loads
        for order in options.orders
        for fairness in (False, True)
    ]
    quiet_rows = [
        measure_quiet(worker, order, fairness, options.seeds)
        for order in options.orders
        for worker, fairness in (("engine", False), ("engine", True), ("simulator", True))
    ]
    closed_rows = [
        row
        for num_requests in CLOSED_REQUESTS
        for worker in ("mixed", "prefill")
        for order in options.orders
        for row in measure_closed(worker, order, num_requests)
    ]
    tables = {"rows": rows, "quiet": quiet_rows, "closed": closed_rows}
    if not options.json:
        lines = [*table(rows), "", *quiet_table(quiet_rows), "", *closed_table(closed_rows)]
        print("\n".join(lines))
    print(json.dumps({"benchmark": "order", **tables}, default=asdict))


if __name__ == "__main__":
    main()
