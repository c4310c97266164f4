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
from baton.engine.fake_runner import FakeRunner
from baton.engine.plan import Plan, SampledToken, StepOutput
from baton.traces.trace import TraceRequest
from benchmarks.machine import describe
from simulator.event_queue import EventQueue
from simulator.prefill import SimulatedPrefillWorker
from simulator.request import SimulatedRequest

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
    ``attained_worst_quartile`` for the quartile of prompt lengths in which it is lowest. ``p50``
    and ``p99`` are TTFTs, ``longest_wait`` is the longest TTFT minus the prompt's own prefill time;
    all three are in seconds. ``fair`` is Jain's index."""

    order: str
    fairness: bool
    load: float
    attained: float
    attained_long: float
    attained_worst_quartile: float
    attained_light: float
    p50: float
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
    "load  order         tenants  attained  long  worst ¼  light    p50     p99  longest   fair"
)


def table(rows: Sequence[PrefillOrderRow]) -> Iterator[str]:
    yield HEADER
    for row in rows:
        yield (
            f"{row.load:4.1f}  {row.order:12}  {'vtc' if row.fairness else '-':7}"
            f"  {row.attained:8.3f}  {row.attained_long:4.2f}  {row.attained_worst_quartile:7.3f}"
            f"  {row.attained_light:5.3f}  {row.p50:5.2f}  {row.p99:6.1f}  {row.longest_wait:7.1f}"
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
    if not options.json:
        print("\n".join([*table(rows), "", *quiet_table(quiet_rows)]))
    report = {"rows": [asdict(row) for row in rows], "quiet": [asdict(row) for row in quiet_rows]}
    print(json.dumps({"benchmark": "order", **report}))


if __name__ == "__main__":
    main()
