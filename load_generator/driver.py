"""Sends a load: open, when it is due; closed, when its users have their answers."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.clock import Clock
from baton.traces.seed import seeded_generator
from baton.traces.trace import Trace, TraceRequest
from load_generator.connection_pool import ConnectionPool
from load_generator.load_spec import LoadSpec, group_by_session
from load_generator.prompts import RequestBodyEncoder
from load_generator.record import LatencyHistogram, RequestRecord, record_of
from load_generator.request import TIMEOUT, BenchRequest, RequestError
from load_generator.target import BenchTarget

SWEEP_SECONDS = 0.25
ROOM_SECONDS = 0.001
YIELD_EVERY = 16
"""Requests of one moment are sent without a look at what comes back, but not more."""

MAX_RECORDS = 5_000_000
"""Some 200 bytes each."""


@dataclass(frozen=True, slots=True)
class DriverLimits:
    """``at_once`` bounds requests under way: each has a connection."""

    timeout_seconds: float
    at_once: int


class LoadDriver:
    """One run against one server. ``records`` and ``gaps`` are of what was measured and has
    ended."""

    def __init__(
        self,
        target: BenchTarget,
        wording: RequestBodyEncoder,
        load: LoadSpec,
        clock: Clock,
        limits: DriverLimits,
    ) -> None:
        self._pool = ConnectionPool(target, clock)
        self._head = target.head("POST", wording.path)
        self._wording = wording
        self._load = load
        self._clock = clock
        self._limits = limits
        self._flying: dict[BenchRequest, None] = {}
        self._began_at = 0.0
        self._issuing: asyncio.Task[None] | None = None
        self.records: list[RequestRecord] = []
        self.gaps = LatencyHistogram()
        self.num_sent = self.num_ended = self.num_failed = self.most_at_once = 0
        self.interrupted = False

    async def run(self, trace: Trace, begin_at: float, on_sweep: Callable[[], None]) -> None:
        """Returns when all that was sent has ended. ``begin_at`` is by the clock."""
        self._began_at = begin_at
        issue = self._closed(trace) if self._load.closed else self._open(trace)
        watching = asyncio.ensure_future(self._watch(on_sweep))
        self._issuing = asyncio.ensure_future(issue)
        try:
            await asyncio.wait([self._issuing])
            if not self._issuing.cancelled():
                self._issuing.result()
            while self._flying and not self.interrupted:
                await self._clock.sleep(SWEEP_SECONDS / 10)
        finally:
            watching.cancel()
            self._issuing.cancel()
            self._pool.close()

    def stop(self) -> None:
        """What is under way counts for nothing."""
        self.interrupted = True
        if self._issuing is not None:
            self._issuing.cancel()

    @property
    def num_flying(self) -> int:
        return len(self._flying)

    @property
    def seconds(self) -> float:
        return self._clock.monotonic() - self._began_at

    # -- open ------------------------------------------------------------------------------

    async def _open(self, trace: Trace) -> None:
        warm_up = self._load.warm_up_requests(len(trace.arrivals))
        for number, arrival in enumerate(trace.arrivals):
            due = self._began_at + arrival.at_seconds
            await self._until(due, number)
            self._send(arrival, due, number >= warm_up)

    async def _until(self, due: float, number: int) -> None:
        """And until there is room; whoever waits for that is late, which is told."""
        left = due - self._clock.monotonic()
        if left > 0:
            await self._clock.sleep(left)
        elif number % YIELD_EVERY == 0:
            await self._clock.sleep(0)
        while len(self._flying) >= self._limits.at_once:
            await self._clock.sleep(ROOM_SECONDS)

    # -- closed ----------------------------------------------------------------------------

    async def _closed(self, trace: Trace) -> None:
        await self._clock.sleep(max(self._began_at - self._clock.monotonic(), 0.0))
        users = ClosedLoopUsers(self, self._load, trace, self._clock)
        await users.run(self._began_at)

    # -- calls -----------------------------------------------------------------------------

    def send(
        self, arrival: TraceRequest, measured: bool, lap: int, then: Callable[[], None]
    ) -> None:
        """Of a closed loop: now."""
        self._send(arrival, self._clock.monotonic(), measured, lap, then)

    def _send(
        self,
        arrival: TraceRequest,
        due: float,
        measured: bool,
        lap: int = 0,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        warm_up = self._load.warm_up_seconds
        measured = measured and (not warm_up or due >= self._began_at + warm_up)

        def end(call: BenchRequest) -> None:
            self._ended(call)
            then()

        body = self._wording.body(arrival, lap)
        call = BenchRequest(arrival, measured, due, end)
        self._flying[call] = None
        self.num_sent += 1
        self.most_at_once = max(self.most_at_once, len(self._flying))
        self._pool.send(call, b"%b%d\r\n\r\n%b" % (self._head, len(body), body))

    def _ended(self, call: BenchRequest) -> None:
        self._flying.pop(call, None)
        self._pool.forget(call)
        self.num_ended += 1
        self.num_failed += call.fault is not None
        if call.measured and not self.interrupted and len(self.records) < MAX_RECORDS:
            self.records.append(record_of(call, self._began_at))
            self.gaps.add(call.gaps)

    async def _watch(self, on_sweep: Callable[[], None]) -> None:
        patience = self._limits.timeout_seconds
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            earliest = self._clock.monotonic() - patience
            for call in [call for call in self._flying if call.sent_at < earliest]:
                message = f"no end within {patience:g} s"
                self._pool.drop(call, RequestError(call.status, TIMEOUT, message))
            on_sweep()


class ClosedLoopUsers:
    """Each has one conversation after the other, turn by turn, and thinks between two turns."""

    def __init__(self, driver: LoadDriver, load: LoadSpec, trace: Trace, clock: Clock) -> None:
        assert load.concurrency is not None
        self._driver = driver
        self._load = load
        self._clock = clock
        self._sessions = group_by_session(trace.arrivals)
        self._num_users = load.concurrency
        self._warm_up = load.warm_up_requests(len(trace.arrivals))
        self._most = None if load.duration is not None and load.requests is None else len(
            trace.arrivals
        )  # fmt: skip
        self._chance = seeded_generator(load.seed)
        self._next_session = self._num_issued = self._num_idle = 0
        self._over = asyncio.Event()
        self._ends_at = 0.0

    async def run(self, began_at: float) -> None:
        """Returns when nothing more is to be sent."""
        loop = asyncio.get_running_loop()
        if self._load.duration is not None:
            self._ends_at = began_at + self._load.duration
            left = self._ends_at - self._clock.monotonic()
            loop.call_later(max(left, 0.0), self._over.set)
        for _ in range(self._num_users):
            self._turn(deque())
        await self._over.wait()

    def _turn(self, left: deque[tuple[TraceRequest, int]]) -> None:
        """The next one of a user, perhaps of a new conversation."""
        if not left:
            left = self._conversation()
        if not left or self._done():
            self._num_idle += 1
            if self._num_idle == self._num_users:
                self._over.set()
            return
        arrival, lap = left.popleft()
        measured = self._num_issued >= self._warm_up
        self._num_issued += 1
        self._driver.send(arrival, measured, lap, lambda: self._think(left))

    def _think(self, left: deque[tuple[TraceRequest, int]]) -> None:
        seconds = self._load.think_seconds
        if seconds and left:
            pause = self._chance.exponential(seconds)
            asyncio.get_running_loop().call_later(pause, self._turn, left)
        else:
            asyncio.get_running_loop().call_soon(self._turn, left)

    def _done(self) -> bool:
        late = self._load.duration is not None and self._clock.monotonic() >= self._ends_at
        full = self._most is not None and self._num_issued >= self._most
        return late or full or self._driver.interrupted

    def _conversation(self) -> deque[tuple[TraceRequest, int]]:
        lap, place = divmod(self._next_session, len(self._sessions))
        self._next_session += 1
        return deque((arrival, lap) for arrival in self._sessions[place])
