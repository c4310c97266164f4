"""Sends a load. In an open loop, requests are sent at given times. In a closed loop, each user
sends the next request after the answer to the previous one."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.clock import Clock
from baton.traces.trace import Trace, TraceRequest, seeded_generator
from load_generator.connection_pool import ConnectionPool
from load_generator.load_spec import LoadSpec, group_by_session
from load_generator.prompts import RequestBodyEncoder
from load_generator.record import LatencyHistogram, RequestRecord, make_record
from load_generator.request import TIMEOUT, BenchRequest, RequestError
from load_generator.target import BenchTarget

SWEEP_SECONDS = 0.25
CAPACITY_POLL_SECONDS = 0.001
YIELD_EVERY = 16
"""The number of overdue requests sent in a row before the event loop may handle responses."""

MAX_RECORDS = 5_000_000
"""The maximum number of records that are kept, of some 200 bytes each."""


@dataclass(frozen=True, slots=True)
class DriverLimits:
    """``max_inflight`` is the maximum number of requests in flight; each has its own connection."""

    timeout_seconds: float
    max_inflight: int


class LoadDriver:
    """Sends one load to one server. ``records`` and ``inter_token_latencies`` (in seconds) cover
    the measured requests that have ended."""

    def __init__(
        self,
        target: BenchTarget,
        encoder: RequestBodyEncoder,
        load: LoadSpec,
        clock: Clock,
        limits: DriverLimits,
    ) -> None:
        self._pool = ConnectionPool(target, clock)
        self._request_head = target.request_head("POST", encoder.path)
        self._encoder = encoder
        self._load = load
        self._clock = clock
        self._limits = limits
        self._inflight: dict[BenchRequest, None] = {}
        self._began_at = 0.0
        self._sending_task: asyncio.Task[None] | None = None
        self.records: list[RequestRecord] = []
        self.inter_token_latencies = LatencyHistogram()
        self.num_sent = self.num_ended = self.num_failed = self.max_inflight = 0
        self.interrupted = False

    async def run(self, trace: Trace, begin_at: float, on_sweep: Callable[[], None]) -> None:
        """Send the trace, starting at the clock time ``begin_at``; return when every request has
        ended, or when ``stop`` is called."""
        self._began_at = begin_at
        issue = (
            self._send_closed_loop(trace)
            if self._load.is_closed_loop
            else self._send_open_loop(trace)
        )
        watching = asyncio.ensure_future(self._drop_timed_out_requests(on_sweep))
        self._sending_task = asyncio.ensure_future(issue)
        try:
            await asyncio.wait([self._sending_task])
            if not self._sending_task.cancelled():
                self._sending_task.result()
            while self._inflight and not self.interrupted:
                await self._clock.sleep(SWEEP_SECONDS / 10)
        finally:
            watching.cancel()
            self._sending_task.cancel()
            self._pool.close()

    def stop(self) -> None:
        """End the run; requests in flight are not recorded."""
        self.interrupted = True
        if self._sending_task is not None:
            self._sending_task.cancel()

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @property
    def elapsed_seconds(self) -> float:
        return self._clock.monotonic() - self._began_at

    # -- open ------------------------------------------------------------------------------

    async def _send_open_loop(self, trace: Trace) -> None:
        warm_up = self._load.warm_up_requests(len(trace.requests))
        for number, arrival in enumerate(trace.requests):
            due = self._began_at + arrival.arrival_seconds
            await self._wait_until_due(due, number)
            self._send(arrival, due, number >= warm_up)

    async def _wait_until_due(self, due: float, number: int) -> None:
        """Wait until ``due``, and until fewer requests than the limit are in flight. If the limit
        delays a request, its record shows by how much."""
        seconds = due - self._clock.monotonic()
        if seconds > 0:
            await self._clock.sleep(seconds)
        elif number % YIELD_EVERY == 0:
            await self._clock.sleep(0)
        while len(self._inflight) >= self._limits.max_inflight:
            await self._clock.sleep(CAPACITY_POLL_SECONDS)

    # -- closed ----------------------------------------------------------------------------

    async def _send_closed_loop(self, trace: Trace) -> None:
        await self._clock.sleep(max(self._began_at - self._clock.monotonic(), 0.0))
        users = ClosedLoopUsers(self, self._load, trace, self._clock)
        await users.run(self._began_at)

    # -- requests --------------------------------------------------------------------------

    def send(
        self, arrival: TraceRequest, measured: bool, repetition: int, on_end: Callable[[], None]
    ) -> None:
        """Send a request of a closed loop now; call ``on_end`` when it has ended. ``repetition`` is
        the number of times that the trace has been sent before."""
        self._send(arrival, self._clock.monotonic(), measured, repetition, on_end)

    def _send(
        self,
        arrival: TraceRequest,
        due: float,
        measured: bool,
        repetition: int = 0,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        warm_up = self._load.warm_up_seconds
        measured = measured and (not warm_up or due >= self._began_at + warm_up)

        def end(call: BenchRequest) -> None:
            self._on_request_end(call)
            on_end()

        body = self._encoder.encode_body(arrival, repetition)
        call = BenchRequest(arrival, measured, due, end)
        self._inflight[call] = None
        self.num_sent += 1
        self.max_inflight = max(self.max_inflight, len(self._inflight))
        self._pool.send(call, b"%b%d\r\n\r\n%b" % (self._request_head, len(body), body))

    def _on_request_end(self, call: BenchRequest) -> None:
        self._inflight.pop(call, None)
        self._pool.remove(call)
        self.num_ended += 1
        self.num_failed += call.error is not None
        if call.is_measured and not self.interrupted and len(self.records) < MAX_RECORDS:
            self.records.append(make_record(call, self._began_at))
            self.inter_token_latencies.add(call.inter_token_seconds)

    async def _drop_timed_out_requests(self, on_sweep: Callable[[], None]) -> None:
        """Every ``SWEEP_SECONDS``, abort the requests that have timed out, and report progress."""
        timeout = self._limits.timeout_seconds
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            earliest = self._clock.monotonic() - timeout
            for call in [call for call in self._inflight if call.sent_at < earliest]:
                message = f"not completed within {timeout:g} s"
                self._pool.abort(call, RequestError(call.status, TIMEOUT, message))
            on_sweep()


class ClosedLoopUsers:
    """The users of a closed loop. Each has one conversation after another, turn by turn, with a
    random pause between two turns."""

    def __init__(self, driver: LoadDriver, load: LoadSpec, trace: Trace, clock: Clock) -> None:
        assert load.concurrency is not None
        self._driver = driver
        self._load = load
        self._clock = clock
        self._sessions = group_by_session(trace.requests)
        self._num_users = load.concurrency
        self._warm_up = load.warm_up_requests(len(trace.requests))
        self._max_requests = None if load.duration is not None and load.requests is None else len(
            trace.requests
        )  # fmt: skip
        self._random = seeded_generator(load.seed)
        self._next_session = self._num_sent = self._num_idle = 0
        self._finished = asyncio.Event()
        self._ends_at = 0.0

    async def run(self, began_at: float) -> None:
        """Start all users; return when no user will send another request."""
        loop = asyncio.get_running_loop()
        if self._load.duration is not None:
            self._ends_at = began_at + self._load.duration
            seconds = self._ends_at - self._clock.monotonic()
            loop.call_later(max(seconds, 0.0), self._finished.set)
        for _ in range(self._num_users):
            self._send_next_turn(deque())
        await self._finished.wait()

    def _send_next_turn(self, turns: deque[tuple[TraceRequest, int]]) -> None:
        """Send a user's next turn: the first of ``turns`` or, if that is empty, the first of a new
        conversation. If the load has ended, send nothing, and count the user as idle."""
        if not turns:
            turns = self._next_conversation()
        if not turns or self._is_finished():
            self._num_idle += 1
            if self._num_idle == self._num_users:
                self._finished.set()
            return
        arrival, lap = turns.popleft()
        measured = self._num_sent >= self._warm_up
        self._num_sent += 1
        self._driver.send(arrival, measured, lap, lambda: self._schedule_next_turn(turns))

    def _schedule_next_turn(self, turns: deque[tuple[TraceRequest, int]]) -> None:
        seconds = self._load.think_seconds
        if seconds and turns:
            pause = self._random.exponential(seconds)
            asyncio.get_running_loop().call_later(pause, self._send_next_turn, turns)
        else:
            asyncio.get_running_loop().call_soon(self._send_next_turn, turns)

    def _is_finished(self) -> bool:
        out_of_time = self._load.duration is not None and self._clock.monotonic() >= self._ends_at
        all_sent = self._max_requests is not None and self._num_sent >= self._max_requests
        return out_of_time or all_sent or self._driver.interrupted

    def _next_conversation(self) -> deque[tuple[TraceRequest, int]]:
        """Return the turns of the next conversation, each with its ``repetition``. After the last
        conversation, begin again with the first one, with a ``repetition`` that is higher by
        one."""
        lap, index = divmod(self._next_session, len(self._sessions))
        self._next_session += 1
        return deque((arrival, lap) for arrival in self._sessions[index])
