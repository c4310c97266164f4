"""Divides the cores of a host between the workers of this user that compute at the same time.

Left to itself, Linux lets the threads of two busy workers meet on one core while another core is
idle: it moves a thread that ran a moment ago only after a while. So a worker tells the others, in a
file that all of them map, when it begins and ends a step. A worker that computes alone
uses all cores. If several do, each gets cores of its own.
"""

import contextlib
import fcntl
import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MAX_WORKERS = 32

BETWEEN_STEPS_SECONDS = 0.002
"""A worker counts as computing for this long after a step: the next one begins soon."""

SUSPICIOUS_SECONDS = 1.0
"""If a step takes longer than this, it is checked whether its worker is still there."""

_SLOT = struct.Struct("=qd")
"""A worker's slot: whether it is within a step, and when that step began or the last one ended, in
seconds of the system's monotonic clock, which all processes share."""

_SLOTS = struct.Struct("=" + "qd" * MAX_WORKERS)


@dataclass(frozen=True, slots=True)
class CoreShare:
    """With how many threads a worker is to compute, and on which cores."""

    num_threads: int
    cores: tuple[int, ...]


class CoreShares:
    """This worker's slot among those of the host's workers."""

    def __init__(
        self,
        path: Path,
        number: int,
        lock: IO[bytes],
        slots: mmap.mmap,
        cores: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        self.number = number
        self.cores = tuple(cores)
        self._path = path
        self._lock = lock
        self._slots = slots
        self._clock = clock

    @classmethod
    def join(
        cls, folder: Path, cores: Sequence[int], clock: Callable[[], float]
    ) -> "CoreShares | None":
        """Take a free slot among the workers that may use the same ``cores``. ``folder`` is one
        that only this user can open, on this host. Return None if all slots are taken, or if the
        files can't be used."""
        name = f"cores-{sum(1 << core for core in cores):x}"
        try:
            with (folder / name).open("a+b") as file:
                file.truncate(_SLOTS.size)
                slots = mmap.mmap(file.fileno(), _SLOTS.size)
            for number in range(MAX_WORKERS):
                if (lock := _try_lock(folder / f"{name}-{number}")) is not None:
                    _SLOT.pack_into(slots, number * _SLOT.size, 0, 0.0)
                    return cls(folder / name, number, lock, slots, cores, clock)
        except OSError:
            return None
        return None

    def begin_step(self) -> CoreShare:
        """Record that a step begins; return the cores for it."""
        now = self._clock()
        self._record(1, now)
        values = _SLOTS.unpack_from(self._slots)
        slots = zip(values[::2], values[1::2], strict=True)
        computing = [
            number
            for number, (in_step, at_seconds) in enumerate(slots)
            if (self._is_alive(number, now - at_seconds) if in_step
                else 0 <= now - at_seconds < BETWEEN_STEPS_SECONDS)
        ]  # fmt: skip
        return _share(self.cores, computing, self.number)

    def end_step(self) -> None:
        self._record(0, self._clock())

    def leave(self) -> None:
        """Free the slot. When a process ends in any way, its slot becomes free, too."""
        self._record(0, 0.0)
        self._lock.close()

    def _record(self, is_computing: int, at_seconds: float) -> None:
        _SLOT.pack_into(self._slots, self.number * _SLOT.size, is_computing, at_seconds)

    def _is_alive(self, number: int, in_step_seconds: float) -> bool:
        """Return whether the worker of a slot, which has been within a step for some time, still
        runs. If it does not, free the slot. A time in the future was written before the host was
        started."""
        if 0 <= in_step_seconds < SUSPICIOUS_SECONDS:
            return True
        lock = _try_lock(self._path.with_name(f"{self._path.name}-{number}"))
        if lock is None:
            return True
        _SLOT.pack_into(self._slots, number * _SLOT.size, 0, 0.0)
        lock.close()
        return False


def _share(cores: tuple[int, ...], computing: Sequence[int], number: int) -> CoreShare:
    """Divide the cores between the ``computing`` workers, in the order of their numbers. If there
    are fewer cores than workers, each has one thread, which may run anywhere."""
    count = len(computing)
    if count == 1 or count > len(cores):
        return CoreShare(len(cores) if count == 1 else 1, cores)
    place = computing.index(number)
    begin, end = (len(cores) * each // count for each in (place, place + 1))
    return CoreShare(end - begin, cores[begin:end])


def _try_lock(path: Path) -> IO[bytes] | None:
    """Lock a slot until the file is closed, or the process ends. Return None if it is locked."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("ab"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        stack.pop_all()
        return file
