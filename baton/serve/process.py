"""One way to run a program: in a process of its own, with signals and an ops server."""

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys

from baton.errors import BatonError
from baton.serve.lifecycle import Lifecycle, LoadStalled, Program
from baton.serve.ops_server import OpsServer
from baton.serve.status_pipe import STATUS
from baton.serve.termination_message import report_fatal_error

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

GC_THRESHOLD = 50_000
"""Objects made and not freed; some ten megabytes."""


def serve(program: Program, drain_seconds: float, ops: OpsServer, ops_address: str = "") -> None:
    """Runs ``program`` in an event loop of its own until SIGTERM or SIGINT. ``ops`` tells others
    how it is. Raises BatonError for what the world does, anything else for a bug."""
    import uvloop

    lifecycle = Lifecycle(program, drain_seconds, ops_address)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lifecycle.ask_to_stop)

        def drain() -> None:
            loop.call_soon_threadsafe(lifecycle.ask_to_drain)

        ops.watch(program.metrics, drain)
        try:
            await lifecycle.run()
        except LoadStalled as error:
            report_fatal_error(error)
            _leave_threads(1)
        if not lifecycle.has_served:
            _leave_threads(0)

    _calm_collector()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except BaseExceptionGroup as group:
        error = single_error(group)
        if error is None:
            raise
        raise error from group
    finally:
        STATUS.vitals.end()


def _leave_threads(code: int) -> None:
    """A thread may be loading weights still, and can't be told to stop."""
    sys.stderr.flush()
    os._exit(code)


def _calm_collector() -> None:
    """What was imported is never garbage, and is not looked at again; the rest is looked at less
    often: a busy router spent a quarter of its time on it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)


def single_error(group: BaseExceptionGroup[BaseException]) -> BatonError | None:
    """The first error of ours, if nothing else is in the group: a bug is never hidden."""
    ours, bugs = group.split(BatonError)
    if ours is None or bugs is not None:
        return None
    error: BaseException = ours
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, BatonError)
    return error


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends, however that ends.
    For between fork and exec: it imports nothing and takes no lock."""
    with contextlib.suppress(AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
