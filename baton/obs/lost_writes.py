"""Output and files whose loss ends nothing: what can't be written, because the disk is full or a
reader has gone away, is counted and dropped."""

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class LostWrites:
    """Counts the writes of this process that failed, by file."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._failing: dict[str, int] = {}
        self._resumed: dict[str, int] = {}

    def record_loss(self, file: str) -> bool:
        """Count a write that failed, and return whether it is the first since one succeeded."""
        self.counts[file] = self.counts.get(file, 0) + 1
        self._failing[file] = self._failing.get(file, 0) + 1
        return self._failing[file] == 1

    def record_success(self, file: str) -> bool:
        """Record that a write succeeded, and return whether the one before had failed."""
        lost = self._failing.pop(file, 0) if self._failing else 0
        if lost:
            self._resumed[file] = self._resumed.get(file, 0) + lost
        return lost > 0

    def take_resumed(self) -> dict[str, int]:
        """Return, by file, how many writes were lost until writing worked again, and have not been
        returned before."""
        if not self._resumed:
            return {}
        resumed, self._resumed = self._resumed, {}
        return resumed


LOST_WRITES = LostWrites()


class LossyFile(io.FileIO):
    """An open descriptor that is written to without errors."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._counted_as = name

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            written = super().write(data)
        except OSError:
            LOST_WRITES.record_loss(self._counted_as)
            return memoryview(data).nbytes
        LOST_WRITES.record_success(self._counted_as)
        return written


def tolerate_lost_output() -> None:
    """From now on, no write to this process's standard output or standard error fails. Call it
    before logging is configured. If they were closed when the process started, they discard what
    is written, and no other file gets their descriptors."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        with suppress(AttributeError, OSError):  # None if it was closed at the start
            stream.flush()
        text = io.TextIOWrapper(
            io.BufferedWriter(LossyFile(descriptor, name)),
            encoding=getattr(stream, "encoding", "utf-8"),
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, text)
