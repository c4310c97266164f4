"""Threads that compute grammar masks. A thread that takes too long is abandoned, since threads
can't be killed."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from baton.system.thread_clock import ThreadClock
from baton.text.grammar.limits import MAX_ABANDONED_THREADS

STACK_BYTES = 64 << 20
"""Stack size, in address space: untouched pages cost nothing. Grammars were checked with a
sixteenth of it (:mod:`baton.text.grammar.helper_process`)."""

MASK_CPU_SECONDS = 0.1
"""CPU time limit of one mask: a step waits for all of its masks. Masks of typical grammars take
5 µs to 2 ms."""

MASK_TIMEOUT_SECONDS = 2.0
"""Time limit for waiting for one mask, in case other load occupies the CPUs."""

POLL_SECONDS = 0.02
"""Interval between checks for slow threads."""


class MaskTimeout(Exception):
    """A mask took longer than its limit."""


class MaskJob:
    """One mask computation, waiting or running in a thread."""

    __slots__ = ("_bits", "_call", "_crash", "_done", "_threads")

    def __init__(self, threads: "MaskThreadPool", call: Callable[[], bytes]) -> None:
        self._threads = threads
        self._call = call
        self._done = threading.Event()
        self._bits = b""
        self._crash: BaseException | None = None

    def result(self) -> bytes:
        """Wait for the mask and return it. Raises MaskTimeout if the mask takes too long, or the
        error that the call raised."""
        if not self._done.is_set():
            self._wait()
        if self._crash is not None:
            raise self._crash
        return self._bits

    def run(self) -> None:
        try:
            self.set_result(self._call())
        except BaseException as error:  # a native library's panic is not an Exception
            self.set_result(crash=error)

    def set_result(self, bits: bytes = b"", crash: BaseException | None = None) -> None:
        """Set the result, unless it was set before."""
        if not self._done.is_set():
            self._bits, self._crash = bits, crash
            self._done.set()

    def _wait(self) -> None:
        until = time.monotonic() + MASK_TIMEOUT_SECONDS
        while not self._done.wait(POLL_SECONDS):
            self._threads.abandon_slow_threads()
            if time.monotonic() > until:
                self.set_result(crash=MaskTimeout(f"it took more than {MASK_TIMEOUT_SECONDS:g} s"))


class MaskThreadPool:
    """A pool of ``num_threads`` threads with large stacks. Thread-safe."""

    def __init__(self, num_threads: int) -> None:
        self._jobs: SimpleQueue[MaskJob] = SimpleQueue()
        self._lock = threading.Lock()
        self._abandoned: list[_Thread] = []
        self._threads = [_Thread(self._jobs) for _ in range(num_threads)]

    def submit(self, call: Callable[[], bytes]) -> MaskJob:
        job = MaskJob(self, call)
        self._jobs.put(job)
        return job

    def abandon_slow_threads(self) -> None:
        """Fail the jobs that have exceeded their time limit: :meth:`MaskJob.result` raises
        MaskTimeout. Their threads can't be stopped; they end when the computation does, and new
        threads take their places at once."""
        with self._lock:
            self._abandoned = [each for each in self._abandoned if each.is_alive()]
            for index, thread in enumerate(self._threads):
                if thread.end_slow_job() and len(self._abandoned) < MAX_ABANDONED_THREADS:
                    self._abandoned.append(thread)
                    self._threads[index] = _Thread(self._jobs)
                    thread.stop_after_job()


class _Thread:
    """Runs jobs one after another until :meth:`stop_after_job` is called."""

    def __init__(self, jobs: "SimpleQueue[MaskJob]") -> None:
        self._jobs = jobs
        self._is_stopping = False
        self._current_job: tuple[MaskJob, float] | None = None
        """The current job, and the clock's reading when it began."""
        self._clock: ThreadClock | None = None
        before = threading.stack_size(STACK_BYTES)
        try:
            self._thread = threading.Thread(target=self._run, name="mask", daemon=True)
            self._thread.start()
        finally:
            threading.stack_size(before)

    def stop_after_job(self) -> None:
        """Make the thread end after its current job."""
        self._is_stopping = True

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def end_slow_job(self) -> bool:
        """End the current job with MaskTimeout if it has exceeded its CPU time. Return whether the
        thread is then still busy with that job."""
        under_way = self._current_job
        if under_way is None or self._clock is None:
            return False
        job, began = under_way
        limit, unit = MASK_TIMEOUT_SECONDS, "s"
        if self._clock.is_cpu_time:
            limit, unit = MASK_CPU_SECONDS, "s of CPU time"
        if self._clock.seconds() - began < limit:
            return False
        job.set_result(crash=MaskTimeout(f"it took more than {limit:g} {unit}"))
        return self._current_job is under_way

    def _run(self) -> None:
        self._clock = clock = ThreadClock()
        while not self._is_stopping:
            job = self._jobs.get()
            self._current_job = (job, clock.seconds())
            job.run()
            self._current_job = None
            del job
