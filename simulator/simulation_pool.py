"""Runs simulations of one trace in several processes. Each result is the one that a single process
would compute."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from types import TracebackType
from typing import Any, Generic, TypeVar

from baton.errors import BatonError
from baton.system.cpu_cores import usable_cores
from baton.traces.files import scale_rate
from baton.traces.trace import Trace
from conductor.policy.policies import DEFAULT_POLICY
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.flag_checks import check_at_most
from simulator.scenario import Scenario, mean_rate

MAX_PROCESSES = 256
"""The maximum number of processes. Each has the trace and one simulated cluster in memory."""

MIN_REQUESTS_FOR_PROCESSES = 600
"""With fewer requests, simulations run in this process unless the user asks for several: starting
processes would take longer than they save."""

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation(Generic[T]):
    """A simulation of a trace at ``rate_rps`` requests per second, or at the trace's own rate if
    that is None. ``judge`` computes the result from the cluster; the function and its result are
    sent between processes. ``label`` names the simulation in progress and errors. For
    ``give_up_misses`` see :meth:`SimulatedCluster.run`."""

    label: str
    config: ClusterConfig
    judge: Callable[[SimulatedCluster], T]
    rate_rps: float | None = None
    give_up_misses: int | None = None

    def run(self, trace: Trace) -> T:
        """Run it in this process. An exception gets a note with the label."""
        try:
            if self.rate_rps is not None:
                trace = scale_rate(trace, self.rate_rps / mean_rate(trace))
            scenario = Scenario(config=self.config)
            return self.judge(scenario.run(trace, DEFAULT_POLICY, self.give_up_misses))
        except Exception as error:
            error.add_note(f"This happened in the simulation of {self.label}.")
            raise


class SimulationPool:
    """Runs simulations of ``trace``, at most ``num_processes`` at a time. With one process, they
    run in this one. A context manager: its end kills child processes, whatever they compute."""

    def __init__(self, trace: Trace, num_processes: int) -> None:
        self.trace = trace
        self.num_processes = num_processes
        self._executor: ProcessPoolExecutor | None = None
        self._earlier_children = set(multiprocessing.active_children())
        self._running: dict[Future[Any], str] = {}

    def __enter__(self) -> "SimulationPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._executor is None:
            return
        for child in set(multiprocessing.active_children()) - self._earlier_children:
            child.kill()
        self._executor.shutdown(cancel_futures=True)

    def run_all(self, simulations: Sequence[Simulation[T]], show: Callable[[str], None]) -> list[T]:
        """Run the simulations, and return their results in the same order. ``show`` is called with
        a simulation's label when it starts."""
        numbers = range(len(simulations))
        results: dict[int, T] = self.run_wanted(
            lambda known: [number for number in numbers if number not in known],
            lambda number: simulations[number],
            show,
        )
        return [results[number] for number in numbers]

    def run_wanted(
        self,
        wanted: Callable[[Mapping[K, T]], Iterable[K]],
        simulation_of: Callable[[K], Simulation[T]],
        show: Callable[[str], None],
    ) -> dict[K, T]:
        """Run simulations until ``wanted``, which is called with all results so far, returns
        nothing. Otherwise it returns the keys of simulations, most urgent first, of which
        :attr:`num_processes` can run at a time. Each runs once. Return the results by key; those of
        simulations that nobody waits for any more may be missing."""
        results: dict[K, T] = {}
        pending: dict[K, Future[T]] = {}
        while keys := list(wanted(results)):
            for key in keys:
                if len(self._running) == self.num_processes:
                    break
                if key not in pending:
                    simulation = simulation_of(key)
                    show(simulation.label)
                    pending[key] = self._start(simulation)
            wait(self._running, return_when=FIRST_COMPLETED)
            for key in [key for key, future in pending.items() if future.done()]:
                results[key] = self._result(pending.pop(key))
            for future in [each for each in self._running if each.done()]:
                del self._running[future]
        return results

    def _start(self, simulation: Simulation[T]) -> Future[T]:
        future: Future[T] = Future()
        if self.num_processes == 1:
            future.set_result(simulation.run(self.trace))
        else:
            executor = self._executor = self._executor or self._new_executor()
            with _interrupts_deferred():  # submit starts child processes
                future = executor.submit(_run_in_child, simulation)
        self._running[future] = simulation.label
        return future

    def _result(self, future: Future[T]) -> T:
        try:
            return future.result()
        except BrokenProcessPool as error:
            labels = " or ".join(self._running.values())
            raise BatonError(
                f"a process that simulated {labels} was killed, maybe because memory ran out; each "
                "process needs memory of its own (--processes)"
            ) from error

    def _new_executor(self) -> ProcessPoolExecutor:
        resource_tracker.ensure_running()  # its start would end _interrupts_deferred
        return ProcessPoolExecutor(
            self.num_processes,
            # a fork would copy the locks of the threads that show progress
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin_child,
            initargs=(self.trace,),
        )


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Deliver Ctrl-C to this process only afterwards, and to processes that are started meanwhile
    never: this process kills its children then."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def choose_num_processes(given: int | None, num_requests: int) -> int:
    """Return how many processes to use: ``given`` (``--processes``), otherwise one per usable core,
    or one if a trace is short. Raises Invalid if it is out of range."""
    if given is not None:
        check_at_most("--processes", given, MAX_PROCESSES)
        return given
    if num_requests < MIN_REQUESTS_FOR_PROCESSES:
        return 1
    return min(usable_cores(), MAX_PROCESSES)


# -- in a child process --------------------------------------------------------------------

_traces: list[Trace] = []
"""In a child process, the pool's trace."""


def _begin_child(trace: Trace) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _traces.append(trace)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_in_child(simulation: Simulation[T]) -> T:
    return simulation.run(_traces[0])
