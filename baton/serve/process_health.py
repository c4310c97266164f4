"""Whether this process lives, how far it is, and whether it may be asked: for those who look at it
from outside its event loop.

The event loop beats, who loads says how far it is, and who waits for another thread says so; all
that is only written here, and a thread of the ops server judges. So a loop that stands still can't
tell that it runs, a load of an hour that moves is no hang, and a device that never answers is one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.clock import Clock, SystemClock

STALL_SECONDS = 120.0
"""For a load from one tensor to the next; the largest are some gigabytes."""


ANSWER_SECONDS = 300.0
"""For another thread of this process to take its turn. A step of the engine takes well under a
second, but for the first of its kind, for which kernels are compiled."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """``done`` of ``total`` bytes of ``what``, as of ``at_seconds``."""

    what: str
    done: int
    total: int
    at_seconds: float

    @property
    def under_way(self) -> bool:
        return self.done < self.total

    def __str__(self) -> str:
        return f"{self.what}: {_gigabytes(self.done)} of {_gigabytes(self.total)} GB"


class ProcessHealth:
    """Written by the event loop and by loading threads, read by any thread: each field is replaced
    as a whole. Times are ``clock``'s."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.state = "starting"
        self.has_served = False
        self.drained = False
        self.loading: LoadProgress | None = None
        self._beat_at: float | None = None
        self._waiting: tuple[str, float] | None = None

    # -- written ---------------------------------------------------------------------------

    def begin(self) -> None:
        """A program's life; several follow each other in a test."""
        self.state, self.has_served, self.drained, self.loading = "starting", False, False, None
        self.beat()

    def move(self, state: str) -> None:
        """``state`` is a :class:`baton.serve.lifecycle.ProgramState`'s value."""
        self.state = state
        self.has_served = self.has_served or state == "serving"

    def beat(self) -> None:
        self._beat_at = self._clock.monotonic()

    def end(self) -> None:
        """The event loop beats no more, and need not."""
        self._beat_at = None

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """For ``what`` to answer, while it lasts; of one such wait at a time."""
        self._waiting = (what, self._clock.monotonic())
        try:
            yield
        finally:
            self._waiting = None

    def load(self, what: str, done: int, total: int) -> None:
        self.loading = LoadProgress(what, done, total, self._clock.monotonic())

    # -- read ------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.state == "serving"

    def hang(self, hung_seconds: float) -> str:
        """What stands still; empty while all moves. ``hung_seconds`` is the event loop's bound;
        0: it has none, nor has any other thread."""
        beat, now = self._beat_at, self._clock.monotonic()
        if hung_seconds and beat is not None and now - beat > hung_seconds:
            return f"the event loop has stood still for {now - beat:.0f} s"
        return (self.silence() if hung_seconds else "") or self.stall()

    def silence(self) -> str:
        """Of a thread that does not answer; empty otherwise."""
        waiting = self._waiting
        if waiting is None:
            return ""
        what, since = waiting
        seconds = self._clock.monotonic() - since
        return f"{what} has not answered for {seconds:.0f} s" if seconds > ANSWER_SECONDS else ""

    def stall(self) -> str:
        """Of a load that does not move; empty otherwise."""
        loading = self.loading
        if self.has_served or loading is None or not loading.under_way:
            return ""
        still = self._clock.monotonic() - loading.at_seconds
        return f"{loading}: no progress for {still:.0f} s" if still > STALL_SECONDS else ""

    def describe(self) -> str:
        """One line: the state, and how far a start is."""
        if self.state == "starting" and self.loading is not None:
            return f"starting: {self.loading}"
        return "drained" if self.drained else self.state


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f}"
