"""Loads of concurrent requests on a system, and the times of their answers."""

import asyncio
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.vllm.model import VOCAB_SIZE
from benchmarks.vllm.systems import System
from testkit.machine import SYSTEM_CLOCK, pause

REQUESTS_PER_STREAM = 4
IDLE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Load:
    """``concurrency`` concurrent streams of requests whose prompts have ``num_tokens`` tokens
    each."""

    num_tokens: int
    concurrency: int

    @property
    def num_requests(self) -> int:
        if self.num_tokens > 1024:
            return max(2, self.concurrency)
        return max(REQUESTS_PER_STREAM, 2 * self.concurrency)

    def __str__(self) -> str:
        return f"{self.num_tokens}x{self.concurrency}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The times of one answer, in seconds."""

    ttft: float
    gaps: list[float]


@dataclass(frozen=True, slots=True)
class Row:
    """The result of a load on a system, over all rounds; times in milliseconds."""

    system: str
    load: str
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    tokens_per_second: float


async def run_load(
    system: System, load: Load, rng: np.random.Generator, answer_tokens: int
) -> tuple[list[Answer], float]:
    """Send the load's requests. Return the times of each answer, and the duration of the whole load
    in seconds."""
    prompts = [
        [int(token) for token in rng.integers(10, VOCAB_SIZE, load.num_tokens)]
        for _ in range(load.num_requests)
    ]
    answers: list[Answer] = []

    async def client() -> None:
        while prompts:
            answers.append(await _time_answer(system, prompts.pop(), answer_tokens))

    began = SYSTEM_CLOCK()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(load.concurrency):
            tasks.create_task(client())
    return answers, SYSTEM_CLOCK() - began


async def _time_answer(system: System, prompt: list[int], answer_tokens: int) -> Answer:
    began = SYSTEM_CLOCK()
    times = [SYSTEM_CLOCK() async for _ in system.stream(prompt, answer_tokens)]
    return Answer(times[0] - began, [b - a for a, b in pairwise(times)])


def idle_cpu_percent(system: System) -> dict[str, float]:
    """Return the CPU use of each program of the idle system, with its child processes, in percent
    of a core."""
    parts = system.parts()

    def used() -> dict[str, float]:
        return {
            name: sum(sum(process.cpu_times()[:2]) for process in processes)
            for name, processes in parts.items()
        }

    before = used()
    pause(IDLE_SECONDS)
    return {name: 100 * (seconds - before[name]) / IDLE_SECONDS for name, seconds in used().items()}


def own_cpu_seconds(system: System) -> float:
    """Return the CPU time (s) of all programs but vLLM's servers."""
    programs = [each for name, each in system.parts().items() if name != "servers"]
    return sum(sum(process.cpu_times()[:2]) for each in programs for process in each)


def make_row(system: str, load: str, answers: list[Answer], seconds: float) -> Row:
    """Summarize answers that took ``seconds`` together."""
    ttfts = [1e3 * answer.ttft for answer in answers]
    gaps = [1e3 * gap for answer in answers for gap in answer.gaps]
    return Row(
        system,
        load,
        round(float(np.percentile(ttfts, 50)), 1),
        round(float(np.percentile(ttfts, 99)), 1),
        round(float(np.percentile(gaps, 50)), 1),
        round(float(np.percentile(gaps, 99)), 1),
        round(sum(1 + len(answer.gaps) for answer in answers) / seconds, 1),
    )
