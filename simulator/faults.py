"""What goes wrong in a simulation."""

from dataclasses import dataclass

from baton.core.ids import WorkerId


@dataclass(frozen=True, slots=True)
class WorkerCrash:
    """The worker loses everything, and is back after ``down_seconds``."""

    worker: WorkerId
    at_seconds: float
    down_seconds: float


@dataclass(frozen=True, slots=True)
class WorkerSlowdown:
    """Everything takes ``factor`` times as long there."""

    worker: WorkerId
    factor: float


@dataclass(frozen=True, slots=True)
class Faults:
    deaths: tuple[WorkerCrash, ...] = ()
    slow: tuple[WorkerSlowdown, ...] = ()
