"""The state of a large fleet: its workers and its requests."""

import numpy as np

from simulator.cluster_config import ClusterConfig
from simulator.large_fleet.arrays import Floats, Ints
from simulator.large_fleet.backlog import DeadlineBins, PrefillBacklog
from simulator.large_fleet.decode_pool import DecodePool
from simulator.large_fleet.pool_state import PoolState
from simulator.large_fleet.request_table import NEVER, RequestTable
from simulator.large_fleet.sample import work_seconds


class FleetState:
    """Deadlines are at most ``max_seconds`` ahead. The pools start with ``num_prefill`` and
    ``num_decode`` workers."""

    def __init__(
        self, cluster: ClusterConfig, max_seconds: float, num_prefill: int, num_decode: int
    ) -> None:
        self.cluster = cluster
        self.now_seconds = 0.0
        self.table = RequestTable()
        self.bins = DeadlineBins(max_seconds)
        self.prefill = PoolState(cluster.num_prefill, num_prefill)
        self.decode = PoolState(cluster.num_decode, num_decode)
        self.backlog = PrefillBacklog(cluster.num_prefill)
        self.decode_pool = DecodePool(cluster.decode_cost, self.decode, self.table)

    def submit(
        self, slots: Ints, bins: Ints, new_tokens: Floats, cached_tokens: Floats,
        ready_seconds: Floats,
    ) -> None:  # fmt: skip
        """Queue requests at the prefill workers that the table names; their work can begin
        ``ready_seconds`` from now. Prompts with later deadlines wait for them. The fixed part of a
        step's time is shared by the prompts that are computed in the same step."""
        table, cost = self.table, self.cluster.prefill_cost
        workers = table.prefill[slots]
        queued_tokens = self.backlog.total_seconds[workers] / cost.per_token_seconds
        step_share = np.maximum(
            new_tokens / self.cluster.step_tokens, new_tokens / (new_tokens + queued_tokens)
        )
        seconds = work_seconds(cost, new_tokens, cached_tokens) + cost.fixed_seconds * step_share
        done = self.backlog.seconds_until_done(workers, bins, seconds, ready_seconds)
        self._delay_overtaken(*self.backlog.add(workers, bins, seconds))
        table.deadline_bin[slots] = bins + self.bins.first
        table.first_token_in_seconds[slots] = done

    def _delay_overtaken(self, workers: Ints, added: Floats) -> None:
        """Delay waiting prompts by the work that was ``added`` to their ``workers`` with earlier
        deadlines: see :meth:`simulator.large_fleet.backlog.PrefillBacklog.add`."""
        table = self.table
        rows = np.full(self.prefill.num_workers, -1)
        rows[workers] = np.arange(len(workers))
        waiting = table.waiting()
        row = rows[table.prefill[waiting]]
        bins = self.bins.index(table.deadline_bin[waiting])
        is_behind = (row >= 0) & (bins > 0)
        behind = waiting[is_behind]
        table.first_token_in_seconds[behind] += added[row[is_behind], bins[is_behind] - 1]

    def compute_prompts(self, seconds: float) -> tuple[Ints, float]:
        """Let the prefill workers compute for ``seconds`` from now on. Return the requests that got
        their first token, which the table has now, and the time for which workers were busy, summed
        over them."""
        table = self.table
        waiting = table.waiting()
        until = table.first_token_in_seconds[waiting]
        is_done = until <= seconds
        done = waiting[is_done]
        table.first_token_in_seconds[waiting] = until - seconds
        table.first_token_in_seconds[done] = NEVER
        is_first = table.first_token_at_seconds[done] < 0
        table.first_token_at_seconds[done[is_first]] = self.now_seconds + until[is_done][is_first]
        before = float(self.backlog.total_seconds.sum())
        self.backlog.advance(seconds)
        self._transfer(done, seconds - until[is_done])
        return done, before - float(self.backlog.total_seconds.sum())

    def _transfer(self, slots: Ints, seconds_left: Floats) -> None:
        """Transfer the KV of prompts' last chunks, ``seconds_left`` before the slice's end."""
        tokens = np.minimum(
            self.table.prompt_tokens[slots] - self.table.cached_tokens[slots],
            self.cluster.step_tokens,
        )
        size = np.maximum(tokens, 1.0) * self.cluster.kv_bytes_per_token
        link = self.cluster.link
        transfer = link.latency_seconds + size / link.bytes_per_second
        self.decode_pool.join(slots, seconds_left - transfer)
