"""A large fleet's simulation, in slices of time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from baton.core.states import Role
from baton.traces.seed import seeded_generator
from simulator.large_fleet.arrays import Floats, Ints
from simulator.large_fleet.autoscaling import FleetAutoscaler, FleetObservation
from simulator.large_fleet.config import LargeFleetConfig
from simulator.large_fleet.dispatcher import Dispatcher
from simulator.large_fleet.outages import Outages
from simulator.large_fleet.sample import RequestSample
from simulator.large_fleet.state import FleetState
from simulator.large_fleet.statistics import FleetStatistics

MAX_ENDING_SECONDS = 7200.0
"""After the last arrival, the simulation goes on for at most this long until all requests have
ended."""


@dataclass(slots=True)
class EventCounts:
    """How often each event happened to a request: it arrives, is placed on workers, gets its first
    token, gets its last token."""

    arrivals: int = 0
    placements: int = 0
    first_tokens: int = 0
    ends: int = 0

    @property
    def total(self) -> int:
        return self.arrivals + self.placements + self.first_tokens + self.ends


class LargeFleetSimulation:
    """Simulates a fleet that serves requests drawn from ``sample``; :meth:`run` can be called only
    once. Memory is bounded by the numbers of workers and of requests that are being served."""

    def __init__(self, config: LargeFleetConfig, sample: RequestSample) -> None:
        cluster = config.cluster
        self.events = EventCounts()
        self._config, self._sample = config, sample
        self._generator = seeded_generator(config.seed)
        self._idle_seconds = sample.idle_seconds(cluster.prefill_cost)
        longest = cluster.ttft_slo_seconds + float(self._idle_seconds.max())
        share = config.rate.low_per_second / config.rate.high_per_second
        started = share if config.autoscaling is not None else 1.0
        self._state = state = FleetState(
            cluster,
            longest,
            math.ceil(cluster.num_prefill * started),
            math.ceil(cluster.num_decode * started),
        )
        edges: Floats = np.percentile(sample.prompt_tokens, [25, 50, 75])
        self.statistics = FleetStatistics(config.duration_seconds, edges)
        self._dispatcher = Dispatcher(state, sample, self.statistics, self._generator)
        self._outages = Outages(state, config.topology, config.failures)
        self.autoscaler: FleetAutoscaler | None = None
        if config.autoscaling is not None:
            pools = {Role.PREFILL: state.prefill, Role.DECODE: state.decode}
            answers = float(sample.answer_tokens.mean())
            self.autoscaler = FleetAutoscaler(config.autoscaling, cluster, pools, answers)

    def run(self) -> Iterator[float]:
        """Run the simulation. Yields the virtual time, in seconds, after each slice, so that the
        caller can show the progress. Raises Overloaded if too many requests are served at once."""
        config, state = self._config, self._state
        number, last = 0, math.ceil(config.duration_seconds / config.slice_seconds)
        end = config.duration_seconds + MAX_ENDING_SECONDS
        while number < last or (state.table.in_use.any() and state.now_seconds < end):
            state.now_seconds = number * config.slice_seconds
            self._run_slice(config.slice_seconds, has_arrivals=number < last)
            number += 1
            yield number * config.slice_seconds

    # -- a slice ---------------------------------------------------------------------------

    def _run_slice(self, seconds: float, has_arrivals: bool) -> None:
        state, dispatcher = self._state, self._dispatcher
        passed = state.bins.advance(state.now_seconds)
        state.backlog.pass_bins(passed)
        restarted = self._outages.advance()
        if self.autoscaler is not None and has_arrivals:
            self.autoscaler.advance(state.now_seconds, self._observe)
        dispatcher.advance(seconds, passed)
        self.statistics.record_restarts(state.now_seconds, len(restarted))
        self._place(restarted, must_admit=True)
        if has_arrivals:
            self._place(self._arrive(seconds), must_admit=False)
        self._end(*state.decode_pool.advance(state.now_seconds, seconds))
        done, busy = state.compute_prompts(seconds)
        self.events.first_tokens += len(done)
        if has_arrivals:
            self._record_slice(seconds, busy)

    def _arrive(self, seconds: float) -> Ints:
        """Draw the requests that arrive in a slice, and return their slots, by time of arrival."""
        now, rate, table = self._state.now_seconds, self._config.rate, self._state.table
        mean = rate.expected_arrivals(now + seconds) - rate.expected_arrivals(now)
        count = int(self._generator.poisson(mean))
        drawn, slots = self._sample.draw(self._generator, count), table.take(count)
        arrivals = now + np.sort(self._generator.random(count)) * seconds
        slo = self._config.cluster.ttft_slo_seconds
        table.arrival_seconds[slots] = arrivals
        table.deadline_seconds[slots] = arrivals + slo + self._idle_seconds[drawn]
        table.prompt_tokens[slots] = self._sample.prompt_tokens[drawn]
        table.answer_tokens[slots] = self._sample.answer_tokens[drawn]
        table.cached_tokens[slots] = self._sample.cached_tokens[drawn]
        table.reuse_seconds[slots] = self._sample.reuse_seconds[drawn]
        self.statistics.record_arrivals(now, table.prompt_tokens[slots])
        self.events.arrivals += count
        return slots

    def _place(self, slots: Ints, must_admit: bool) -> None:
        state = self._state
        if not len(slots):
            return
        if not (len(state.prefill.known) and len(state.decode.known)):
            if must_admit:
                self._outages.place_later(slots)
            else:
                self.statistics.record_rejected(state.now_seconds, len(slots))
                state.table.release(slots)
            return
        self._outages.interrupt(self._dispatcher.place(slots, must_admit))
        self.events.placements = self._dispatcher.num_placed

    def _end(self, slots: Ints, ended_seconds: Floats) -> None:
        if not len(slots):
            return
        table, slo = self._state.table, self._config.cluster.itl_slo_seconds
        arrivals, firsts = table.arrival_seconds[slots], table.first_token_at_seconds[slots]
        gaps = table.answer_tokens[slots] - 1
        itl = np.where(gaps > 0, (ended_seconds - firsts) / np.maximum(gaps, 1.0), 0.0)
        met = (firsts <= table.deadline_seconds[slots]) & (itl <= slo)
        prompts = table.prompt_tokens[slots]
        self.statistics.record_ended(arrivals, prompts, firsts - arrivals, itl, met, gaps > 0)
        table.release(slots)
        self.events.ends += len(slots)

    # -- observations ----------------------------------------------------------------------

    def _record_slice(self, seconds: float, busy_seconds: float) -> None:
        state = self._state
        gauges = {
            "prefill": float(len(state.prefill.known)),
            "decode": float(len(state.decode.known)),
            "busy": busy_seconds / seconds,
            "memory": self._dispatcher.projected_tokens / state.cluster.device_tokens,
        }
        self.statistics.record_slice(state.now_seconds, seconds, gauges)

    def _observe(self) -> FleetObservation:
        """Observe the fleet for a plan, and start the planner's next window."""
        state, table = self._state, self._state.table
        window, self._dispatcher.window = self._dispatcher.window, type(self._dispatcher.window)()
        used, waiting = np.flatnonzero(table.in_use), table.waiting()
        cost = state.cluster.prefill_cost
        return FleetObservation(
            window,
            float(state.backlog.total_seconds.sum()) / cost.per_token_seconds,
            self._dispatcher.projected_tokens,
            {
                Role.PREFILL: np.bincount(
                    table.prefill[waiting], minlength=state.prefill.num_workers
                ),
                Role.DECODE: np.bincount(table.decode[used], minlength=state.decode.num_workers),
            },
        )
