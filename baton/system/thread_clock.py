"""The CPU time of a thread, as other threads can read it."""

import sys
import threading
import time

from baton.system.portability import uses_linux


class ThreadClock:
    """A clock of the thread that creates it, for any thread to read. ``is_cpu_time`` says what it
    counts: the thread's CPU time, or, where other threads can't read that, elapsed time."""

    def __init__(self) -> None:
        self._clock = -1
        if sys.platform == "linux" and uses_linux():
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self.is_cpu_time = self._clock != -1

    def seconds(self) -> float:
        return time.clock_gettime(self._clock) if self.is_cpu_time else time.monotonic()
