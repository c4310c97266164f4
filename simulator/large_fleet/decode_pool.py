"""The answers of a fleet's decode workers."""

import numpy as np

from baton.core.cost import DecodeCost
from simulator.large_fleet.arrays import Floats, Ints, decode_step_seconds, sums_by_group
from simulator.large_fleet.pool_state import PoolState
from simulator.large_fleet.request_table import RequestTable


class DecodePool:
    """Continuous batching: each request of a worker's batch gets a token per step. Within a slice,
    a worker's steps take equally long. There is no preemption: admission keeps memory free."""

    def __init__(self, cost: DecodeCost, state: PoolState, table: RequestTable) -> None:
        self.state = state
        self.step_seconds: Floats = np.zeros(state.num_workers)
        self._cost = cost
        self._table = table

    def advance(self, now_seconds: float, seconds: float) -> tuple[Ints, Floats]:
        """Run the batches for ``seconds``. Return the requests that got their last token, and the
        times at which they did."""
        table = self._table
        slots = table.answering()
        workers, left = table.decode[slots], table.remaining_tokens[slots]
        self._update_steps(slots, workers, left)
        steps = np.where(self.state.is_up, seconds / self.step_seconds, 0.0)
        after = left - steps[workers]
        table.remaining_tokens[slots] = after
        ended = np.flatnonzero(after <= 0)
        return slots[ended], now_seconds + left[ended] * self.step_seconds[workers[ended]]

    def join(self, slots: Ints, seconds_left: Floats) -> None:
        """Add requests to the batches of their decode workers. Their first tokens have been sent,
        and their KV arrives ``seconds_left`` before the current slice's end (after it, if this is
        negative)."""
        table = self._table
        workers = table.decode[slots]
        gone = seconds_left / self.step_seconds[workers]
        left = table.answer_tokens[slots] - table.emitted_tokens[slots] - 1
        table.remaining_tokens[slots] = left - gone

    def loads(self, expected_answer_tokens: float) -> tuple[Floats, Floats, Floats]:
        """Return, for each worker, the number of requests placed on it, their context in tokens,
        and the context to which they are expected to grow."""
        table = self._table
        slots = np.flatnonzero(table.in_use)
        workers = table.decode[slots]
        prompts = table.prompt_tokens[slots]
        contexts = prompts + table.generated_tokens(slots)
        size = self.state.num_workers
        context = sums_by_group(workers, contexts, size)
        expected = sums_by_group(workers, prompts + expected_answer_tokens, size)
        requests = np.bincount(workers, minlength=size).astype(np.float64)
        return requests, context, np.maximum(expected, context)

    def _update_steps(self, slots: Ints, workers: Ints, left: Floats) -> None:
        table, size = self._table, self.state.num_workers
        contexts = table.prompt_tokens[slots] + table.answer_tokens[slots] - left
        batch = np.bincount(workers, minlength=size).astype(np.float64)
        context = sums_by_group(workers, contexts, size)
        self.step_seconds = decode_step_seconds(self._cost, batch, context)
