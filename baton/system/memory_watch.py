"""Watches another process's memory, where no system limits it as Linux does (RLIMIT_AS)."""


class MemoryWatch:
    """Compares a process's resident memory with what it had when this object was created."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._first_bytes = self._resident_bytes()

    def has_grown_by(self, size_bytes: int) -> bool:
        return self._resident_bytes() - self._first_bytes > size_bytes

    def _resident_bytes(self) -> int:
        """Return the resident memory; 0 if the process has exited."""
        import psutil

        try:
            return int(psutil.Process(self._pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0
