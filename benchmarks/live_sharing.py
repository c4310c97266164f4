"""Measures how the workers of a live system slow one another down on the cores that they share."""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from baton.clock import SystemClock
from baton.traces.trace import TraceRequest
from benchmarks.vllm.model import VOCAB_SIZE
from benchmarks.vllm.systems import System

CLOCK = SystemClock()
WORKERS = ("prefill", "decode", "mixed", "server")
"""The beginnings of the names of a system's workers."""

ROUNDS = 8
NEIGHBOURS = 2
"""Requests that keep a worker busy: while one of them is sent, another one is computed."""

PROMPT_TOKENS, SHORT_PROMPT_TOKENS, ANSWER_TOKENS = 512, 32, 48


@dataclass(frozen=True, slots=True)
class Overhead:
    """CPU seconds that the processes other than workers (client, router, conductor, store, Redis)
    take for a request, and the number of cores."""

    seconds_per_request: float
    num_cores: int

    def share(self, rate_rps: float) -> float:
        """Return the share of all cores that they take at a rate; at most 0.9."""
        return min(self.seconds_per_request * rate_rps / self.num_cores, 0.9)


@dataclass(frozen=True, slots=True)
class SharingProbe:
    """Measures requests alone and beside others. Prompts are random, so nothing is cached."""

    system: System
    random: np.random.Generator

    async def times(self, prompt_tokens: int, answer_tokens: int) -> list[float]:
        """Send a request; return when its tokens arrived, in seconds since it was sent."""
        prompt = self.random.integers(10, VOCAB_SIZE, prompt_tokens).tolist()
        began = CLOCK.monotonic()
        events = self.system.stream(prompt, answer_tokens)
        return [CLOCK.monotonic() - began async for _ in events]

    async def prompt_seconds(self) -> float:
        return (await self.times(PROMPT_TOKENS, 2))[0]

    async def speed_of_pools(self) -> float:
        """Return the speed of a prefill worker while a decode worker is busy, relative to one that
        is busy alone. The speed of answers beside prompts can't be measured in the same way: while
        the prefill worker is busy, the conductor lets the decode worker compute prompts, too."""

        async def answer() -> None:
            await self.times(SHORT_PROMPT_TOKENS, 4 * ANSWER_TOKENS)

        speed = await self._speed(self.prompt_seconds, answer)
        print(f"speed beside the other: prompts {speed:.2f}")
        return min(speed, 1.0)

    async def speed_of_pair(self) -> float:
        """Return the speed of two mixed workers while both compute a prompt, relative to one that
        computes alone."""
        alone: list[float] = []
        together: list[float] = []
        for _ in range(ROUNDS + 1):
            alone.append(await self.prompt_seconds())
            together += await asyncio.gather(self.prompt_seconds(), self.prompt_seconds())
        speed = statistics.median(alone[1:]) / statistics.median(together[2:])
        print(f"speed beside the other: prompts {speed:.2f}")
        return min(speed, 1.0)

    async def _speed(
        self, measure: Callable[[], Awaitable[float]], neighbour: Callable[[], Awaitable[None]]
    ) -> float:
        await measure()  # warms up
        alone = [await measure() for _ in range(ROUNDS)]

        async def repeat() -> None:
            while True:
                await neighbour()

        neighbours = [asyncio.create_task(repeat()) for _ in range(NEIGHBOURS)]
        try:
            await neighbour()  # by then, the others are under way
            beside = [await measure() for _ in range(ROUNDS)]
        finally:
            for task in neighbours:
                task.cancel()
            ended = await asyncio.gather(*neighbours, return_exceptions=True)
        for error in ended:
            if not isinstance(error, asyncio.CancelledError):
                raise RuntimeError("a request beside the measured ones failed") from error
        return statistics.median(alone) / statistics.median(beside)

    async def overhead(self, requests: Sequence[TraceRequest]) -> Overhead:
        """Send the requests one after the other, and count what the other processes take."""
        others = [psutil.Process()]
        for name, processes in self.system.parts().items():
            if not name.startswith(WORKERS):
                others += processes
        before = sum(map(_cpu_seconds, others))
        for each in requests:
            await self.times(each.num_prompt_tokens, each.num_answer_tokens)
        seconds = (sum(map(_cpu_seconds, others)) - before) / len(requests)
        return Overhead(seconds, psutil.cpu_count() or 1)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
