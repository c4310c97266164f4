"""Compare admission by the predicted KV memory of answers with admission by the prompts alone.

    python -m benchmarks.forecast [--seeds N] [--json]

Runs the production engine in virtual time, with a runner that computes nothing and takes as long as
a GPU would. All requests are prefilled and decoded in one worker, and belong to one tenant. The
lengths of prompts and answers are log-normal (medians 600 and 250 tokens), and ``max_tokens`` is
4096, so that answer lengths can only be predicted from earlier answers. The pool is too small for
all requests: a request that runs out of memory is preempted and recomputed. ``computed`` is the
ratio of computed to needed tokens.

Prints a table, and JSON as the last line; with ``--json``, only the JSON line.
"""

import argparse
import json
import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from baton.clock import ManualClock
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.plan import Plan, SampledToken, StepOutput
from testkit.fakes.runner import FakeRunner
from testkit.machine import describe

STEP_SECONDS = 0.012
PREFILL_TOKEN_SECONDS = 50e-6
CONTEXT_TOKEN_SECONDS = 25e-9
BLOCK_TOKENS = 16
NUM_REQUESTS = 1500
EOS, WORD = TokenId(3), TokenId(7)
CASES = ((2000, 8.0), (4000, 12.0), (8000, 20.0))
"""(blocks of the pool, arrivals per second)"""


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    at_seconds: float
    num_prompt_tokens: int
    num_answer_tokens: int

    @property
    def end(self) -> int:
        return self.num_prompt_tokens + self.num_answer_tokens


@dataclass(frozen=True, slots=True)
class MemoryAdmissionRow:
    """One row of the table. ``all_done`` is the time until all answers have ended, ``mean_request``
    the mean duration of a request, and ``…_gap`` are inter-token latencies; all of these are in
    seconds. ``computed`` is the ratio of computed to needed tokens."""

    num_blocks: int
    forecast: bool
    all_done: float
    preemptions: float
    computed: float
    mean_request: float
    p99_gap: float
    longest_gap: float


class ScriptedRunner(FakeRunner):
    """Checks every plan, computes nothing, and ends each answer where the script says."""

    def __init__(self, clock: ManualClock, num_blocks: int, asks: list[ScriptedRequest]) -> None:
        super().__init__(num_blocks, BLOCK_TOKENS)
        self._clock = clock
        self._asks = asks

    def run(self, plan: Plan) -> StepOutput:
        self._check(plan)
        read = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        context = sum(row.context_tokens for row in plan.rows)
        seconds = STEP_SECONDS + PREFILL_TOKEN_SECONDS * read + CONTEXT_TOKEN_SECONDS * context
        self._clock.advance(seconds)
        sampled: list[SampledToken | None] = []
        for row in plan.rows:
            over = row.context_tokens + 1 >= self._asks[int(row.request_id)].end
            sampled.append(SampledToken(EOS if over else WORD) if row.sample else None)
        return StepOutput(tuple(sampled))


def workload(seed: int, rate: float) -> list[ScriptedRequest]:
    chance = np.random.default_rng(seed)
    times = np.cumsum(chance.exponential(1 / rate, NUM_REQUESTS))
    prompts = np.exp(chance.normal(math.log(600), 0.8, NUM_REQUESTS)).clip(16, 6000)
    answers = np.exp(chance.normal(math.log(250), 0.9, NUM_REQUESTS)).clip(2, 3000)
    return [
        ScriptedRequest(float(time), int(prompt), int(answer))
        for time, prompt, answer in zip(times, prompts, answers, strict=True)
    ]


def run(seed: int, num_blocks: int, rate: float, forecast: bool) -> MemoryAdmissionRow:
    asks, clock = workload(seed, rate), ManualClock()
    config = EngineConfig(
        block_tokens=BLOCK_TOKENS, max_model_tokens=16_384, max_batched_tokens=2048,
        max_sequences=256, max_waiting=NUM_REQUESTS, forecasts_memory=forecast,
    )  # fmt: skip
    engine = Engine(
        ScriptedRunner(clock, num_blocks, asks), config, model_digest=b"", kv_dtype="none",
        eos_token_ids=frozenset({EOS}), clock=clock,
    )  # fmt: skip
    coming, computed = list(reversed(list(enumerate(asks)))), 0
    latest: dict[str, float] = {}
    gaps: list[float] = []
    took: list[float] = []
    while coming or engine.has_work():
        if not engine.has_work():
            clock.advance(max(0.0, coming[-1][1].at_seconds - clock.monotonic()))
        while coming and coming[-1][1].at_seconds <= clock.monotonic():
            engine.add(_spec(*coming.pop()), Task.PREFILL_AND_DECODE)
        result = engine.step()
        computed += result.work.num_tokens if result.work is not None else 0
        now = clock.monotonic()
        for output in result.outputs:
            gaps.append(now - latest.get(output.request_id, now))
            latest[output.request_id] = now
            if output.finish_reason is not None:
                took.append(now - asks[int(output.request_id)].at_seconds)
    return MemoryAdmissionRow(
        num_blocks,
        forecast,
        all_done=clock.monotonic(),
        preemptions=engine.stats().num_preemptions,
        computed=computed / sum(ask.end - 1 for ask in asks),
        mean_request=statistics.fmean(took),
        p99_gap=float(np.percentile(gaps, 99)),
        longest_gap=max(gaps),
    )


def _spec(number: int, ask: ScriptedRequest) -> RequestSpec:
    rest = (TokenId(1 + i % 199) for i in range(ask.num_prompt_tokens - 1))
    tokens = (TokenId(1000 + number), *rest)
    return RequestSpec(
        RequestId(str(number)), Epoch(1), tokens, len(tokens), SamplingParams(max_tokens=4096),
        ttft_slo_seconds=2.0,
    )  # fmt: skip


def mean(rows: list[MemoryAdmissionRow]) -> MemoryAdmissionRow:
    each = [asdict(row) for row in rows]
    means: dict[str, Any] = {
        name: statistics.fmean(row[name] for row in each)
        for name in each[0]
        if name not in ("num_blocks", "forecast")
    }
    return replace(rows[0], **means)


def main() -> None:
    parser = argparse.ArgumentParser(description="Admission by projected memory")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [
        mean([run(seed, num_blocks, rate, forecast) for seed in range(options.seeds)])
        for num_blocks, rate in CASES
        for forecast in (False, True)
    ]
    if not options.json:
        print(describe(), f"seeds 0..{options.seeds - 1}, {NUM_REQUESTS} requests each")
        print("blocks  forecast  all done  preemptions  computed  request  gap p99  longest gap")
        for row in rows:
            print(
                f"{row.num_blocks:6}  {row.forecast!s:8}  {row.all_done:8.1f}"
                f"  {row.preemptions:11.0f}  {row.computed:8.3f}  {row.mean_request:7.1f}"
                f"  {row.p99_gap:7.3f}  {row.longest_gap:11.2f}"
            )
    print(json.dumps({"benchmark": "forecast", "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
