"""Threads that make masks, and are given up when they take too long: none can be killed."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

STACK_BYTES = 64 << 20
"""Of address space: pages that nobody touches cost nothing. Grammars were tried with a sixteenth of
it (:mod:`baton.text.grammar.helper_process`)."""

MASK_SECONDS = 0.1
"""Of a processor, for one token of one answer: a step waits for all of its masks. Masks of grammars
in use take 5 µs to 2 ms."""

WALL_SECONDS = 2.0
"""Of waiting for one mask, where the processors are somebody else's."""

LOOK_SECONDS = 0.02
"""Between two looks at threads that are slow."""

MAX_ABANDONED = 16
"""Threads whose job nobody waits for any longer. Each ends with its job."""


class MaskTimeout(Exception):
    """A mask took more than its time."""


class MaskJob:
    """One call, waiting or under way in some thread."""

    __slots__ = ("_bits", "_call", "_crash", "_done", "_threads")

    def __init__(self, threads: "MaskThreadPool", call: Callable[[], bytes]) -> None:
        self._threads = threads
        self._call = call
        self._done = threading.Event()
        self._bits = b""
        self._crash: BaseException | None = None

    def result(self) -> bytes:
        """Raises TooSlow, or what the call raises."""
        if not self._done.is_set():
            self._wait()
        if self._crash is not None:
            raise self._crash
        return self._bits

    def run(self) -> None:
        try:
            self.end(self._call())
        except BaseException as error:  # a native library's panic is no Exception
            self.end(crash=error)

    def end(self, bits: bytes = b"", crash: BaseException | None = None) -> None:
        """The first end counts."""
        if not self._done.is_set():
            self._bits, self._crash = bits, crash
            self._done.set()

    def _wait(self) -> None:
        until = time.monotonic() + WALL_SECONDS
        while not self._done.wait(LOOK_SECONDS):
            self._threads.give_up_slow()
            if time.monotonic() > until:
                self.end(crash=MaskTimeout(f"it took more than {WALL_SECONDS:g} s"))


class MaskThreadPool:
    """``num_threads`` of them, with large stacks. Thread-safe."""

    def __init__(self, num_threads: int) -> None:
        self._jobs: SimpleQueue[MaskJob] = SimpleQueue()
        self._lock = threading.Lock()
        self._given_up: list[_Thread] = []
        self._threads = [_Thread(self._jobs) for _ in range(num_threads)]

    def submit(self, call: Callable[[], bytes]) -> MaskJob:
        job = MaskJob(self, call)
        self._jobs.put(job)
        return job

    def give_up_slow(self) -> None:
        """Ends jobs that have had their time, and puts fresh threads in the places of theirs."""
        with self._lock:
            self._given_up = [each for each in self._given_up if each.is_alive()]
            for index, thread in enumerate(self._threads):
                if thread.end_slow() and len(self._given_up) < MAX_ABANDONED:
                    self._given_up.append(thread)
                    self._threads[index] = _Thread(self._jobs)
                    thread.leave()


class _Thread:
    """Runs jobs one after the other, until it is to leave."""

    def __init__(self, jobs: "SimpleQueue[MaskJob]") -> None:
        self._jobs = jobs
        self._leaves = False
        self._under_way: tuple[MaskJob, float] | None = None
        """And the thread's processor seconds at its beginning."""
        self._clock = -1
        before = threading.stack_size(STACK_BYTES)
        try:
            self._thread = threading.Thread(target=self._run, name="mask", daemon=True)
            self._thread.start()
        finally:
            threading.stack_size(before)

    def leave(self) -> None:
        """Ends it with its job."""
        self._leaves = True

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def end_slow(self) -> bool:
        """Whether its job has had its time, and is ended by this."""
        under_way = self._under_way
        if under_way is None:
            return False
        job, began = under_way
        if time.clock_gettime(self._clock) - began < MASK_SECONDS:
            return False
        job.end(crash=MaskTimeout(f"it took more than {MASK_SECONDS:g} s of a processor"))
        return self._under_way is under_way

    def _run(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        while not self._leaves:
            job = self._jobs.get()
            self._under_way = (job, time.thread_time())
            job.run()
            self._under_way = None
            del job
