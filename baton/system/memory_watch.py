"""Watches another process's memory, where Linux doesn't limit it (RLIMIT_AS)."""

from contextlib import suppress


class MemoryWatch:
    """Compares a process's resident memory with what it had when this object was created."""

    def __init__(self, pid: int) -> None:
        import psutil

        self._gone = psutil.NoSuchProcess
        self._process = psutil.Process(pid)
        self._first_bytes = self._resident_bytes()

    def has_grown_by(self, size_bytes: int) -> bool:
        return self._resident_bytes() - self._first_bytes > size_bytes

    def _resident_bytes(self) -> int:
        """Return the resident memory; 0 if the process has exited."""
        with suppress(self._gone):
            return int(self._process.memory_info().rss)
        return 0
