"""Faults to inject into a simulation."""

from dataclasses import dataclass

from baton.core.ids import WorkerId


@dataclass(frozen=True, slots=True)
class WorkerCrash:
    """At ``at_seconds``, the worker loses its state. It is back after ``down_seconds``, but not
    before its crash is detected."""

    worker: WorkerId
    at_seconds: float
    down_seconds: float


@dataclass(frozen=True, slots=True)
class WorkerSlowdown:
    """Every step on the worker takes ``factor`` times as long."""

    worker: WorkerId
    factor: float


@dataclass(frozen=True, slots=True)
class Faults:
    crashes: tuple[WorkerCrash, ...] = ()
    slowdowns: tuple[WorkerSlowdown, ...] = ()
