"""Runs a program in its own process, with signal handlers and an ops server."""

import asyncio
import gc
import os
import sys

from baton.errors import BatonError
from baton.serve.lifecycle import Lifecycle, LoadStalled, Program
from baton.serve.ops_server import OpsServer
from baton.serve.settings_watcher import SettingsWatcher
from baton.serve.status_pipe import STATUS
from baton.serve.termination_message import report_fatal_error
from baton.system.stop_signals import handle_stop_signals

GC_THRESHOLD = 50_000
"""Number of objects, allocated but not freed, that triggers a garbage collection; they take some
ten megabytes."""


def serve(
    program: Program,
    drain_timeout_seconds: float,
    ops: OpsServer,
    ops_address: str = "",
    settings_watcher: SettingsWatcher | None = None,
) -> None:
    """Run ``program`` in its own event loop until it is stopped: by its supervisor, if it has one,
    else by a signal. ``ops`` serves its probes and metrics; ``settings_watcher`` is None if there
    is no config file. Raises BatonError for expected errors; any other exception is a bug."""
    import uvloop

    lifecycle = Lifecycle(program, drain_timeout_seconds, ops_address, settings_watcher)

    async def main() -> None:
        if STATUS.is_supervised:
            STATUS.call_when_stopped(lifecycle.request_stop)
            handle_stop_signals(lambda is_interrupt: STATUS.send_stop_signal())
        else:
            handle_stop_signals(lifecycle.request_stop)

        ops.attach_program(program.metrics)
        try:
            await lifecycle.run()
        except LoadStalled as error:
            report_fatal_error(error)
            _exit_without_joining_threads(1)
        if not lifecycle.has_served:
            _exit_without_joining_threads(0)

    _tune_garbage_collector()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except BaseExceptionGroup as group:
        error = single_error(group)
        if error is None:
            raise
        raise error from group
    finally:
        STATUS.health.stop_heartbeats()


def _exit_without_joining_threads(code: int) -> None:
    """Exit at once: a thread may still be loading weights, and can't be stopped."""
    sys.stderr.flush()
    os._exit(code)


def _tune_garbage_collector() -> None:
    """Exclude imported objects from garbage collection, and collect the others less often. With
    Python's defaults, a busy router spent a quarter of its time on garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)


def single_error(group: BaseExceptionGroup[BaseException]) -> BatonError | None:
    """Return the first BatonError of the group. Return None if the group has any other exceptions,
    so that bugs are never hidden."""
    ours, bugs = group.split(BatonError)
    if ours is None or bugs is not None:
        return None
    error: BaseException = ours
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, BatonError)
    return error
