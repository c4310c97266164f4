"""``baton up`` and ``baton down``."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from attached_worker.server_check import check_servers
from baton.clock import Clock, SystemClock
from baton.config import (
    Reader,
    Settings,
    baton_home,
    child_environment,
    config_environment,
    config_file,
    pinned_settings,
    to_environment,
)
from baton.errors import BatonError, Invalid, NotFound, Unavailable
from baton.obs.logs import configure_logging, set_log_level
from baton.obs.lost_writes import tolerate_lost_output
from baton.serve.process import single_error
from baton.serve.settings_watcher import SettingsWatcher
from baton.system.stop_signals import handle_stop_signals
from command_line.startup_view import StartupView
from orchestrator.backends import check_backend, check_models, open_supervisor
from orchestrator.child_process import baton_command
from orchestrator.cluster_state import SUPERVISOR_LOG, ClusterFolder
from orchestrator.control_server import start_control_server
from orchestrator.preflight import check_port
from orchestrator.process_log import ProcessLog
from orchestrator.supervisor import Supervisor

POLL_SECONDS = 0.05


def run_up(settings: Settings, detach: bool) -> None:
    """Start a cluster and supervise it until it is stopped; if ``detach``, do so in the background.
    Raises the error that prevents the cluster from starting."""
    folder = ClusterFolder(baton_home(), settings.cluster)
    if folder.is_locked():
        raise folder.already_running_error()
    check_port(settings.host, settings.port)
    check_backend(settings)
    pinned = check_models(settings)
    _check_attached(pinned)
    if detach:
        _detach(settings, pinned, folder)
        return
    tolerate_lost_output()
    try:
        asyncio.run(_supervise(settings, pinned, folder))
    except BaseExceptionGroup as group:
        error = single_error(group)
        if error is None:
            raise
        raise error from group


def _check_attached(settings: Settings) -> None:
    """Print what attached servers lack. Raises Invalid if one can't be used as it was started. A
    server that does not respond may still be loading its model: its worker waits for it."""
    for report in check_servers(settings):
        if isinstance(report.error, Invalid):
            raise report.error
        if report.error is not None:
            print(f"waiting for a server: {report.error}", file=sys.stderr)
        for advice in report.advice:
            print(f"warning: {report.url}: {advice}", file=sys.stderr)


async def _supervise(settings: Settings, pinned: Settings, folder: ClusterFolder) -> None:
    """Run the cluster with the settings ``pinned``, which are ``settings`` with the commits of hub
    models."""
    configure_logging("warning" if sys.stderr.isatty() else settings.log_level, settings.log_format)
    folder.acquire()
    stop, stop_now = asyncio.Event(), asyncio.Event()
    _install_signal_handlers(stop, stop_now)
    try:
        with StartupView() as view:
            async with open_supervisor(pinned, folder, SystemClock(), view.show) as supervisor:
                # Install them again, since Ray may have replaced them.
                _install_signal_handlers(stop, stop_now)
                control = await start_control_server(folder.control_socket, supervisor.pools)
                own_log = ProcessLog(folder.logs / SUPERVISOR_LOG)
                background = [
                    asyncio.ensure_future(_watch_settings(settings, supervisor)),
                    asyncio.ensure_future(own_log.keep_limited(SystemClock())),
                ]
                try:
                    await supervisor.run(stop, stop_now)
                    if stop_now.is_set():
                        raise Unavailable("stopped at once: answers under way were cut")
                finally:
                    for task in background:
                        task.cancel()
                    control.close()
    finally:
        folder.release()


async def _watch_settings(settings: Settings, supervisor: Supervisor) -> None:
    """Watch the config file until cancelled, and report changed settings that take effect only once
    the cluster is started again. Each process applies by itself the settings that can change while
    it runs."""
    path = config_file()
    if path is None:
        return
    watcher = SettingsWatcher(
        path,
        settings,
        Reader.SUPERVISOR,
        SystemClock(),
        lambda status: supervisor.set_settings_status(status.to_json()),
    )
    if not sys.stderr.isatty():

        async def apply_log_level(settings: Settings) -> None:
            set_log_level(settings.log_level)

        watcher.subscribe(apply_log_level)
    await watcher.run()


def _install_signal_handlers(stop: asyncio.Event, stop_now: asyncio.Event) -> None:
    """Set ``stop`` on the first signal, and ``stop_now`` on the second Ctrl-C."""
    handle_stop_signals(
        lambda is_interrupt: (stop_now if is_interrupt and stop.is_set() else stop).set()
    )


def _detach(settings: Settings, pinned: Settings, folder: ClusterFolder) -> None:
    """Start the supervisor in a session of its own, and return when the cluster is ready. If there
    is a config file, the supervisor reads it itself, but for the models that are pinned. Raises the
    error that prevents the cluster from starting."""
    folder.create()
    in_file: set[str] = set()
    if config_file():
        in_file = Settings.model_fields.keys() - pinned_settings(settings)
        in_file = {name for name in in_file if getattr(settings, name) == getattr(pinned, name)}
    log_path = folder.logs / SUPERVISOR_LOG
    log_path.unlink(missing_ok=True)
    with ProcessLog(log_path).open() as log_file:
        process = subprocess.Popen(
            baton_command("up"),
            env=child_environment(to_environment(pinned, in_file), config_environment()),
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await_ready(process, folder, log_path, SystemClock())
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def _await_ready(
    process: "subprocess.Popen[bytes]", folder: ClusterFolder, log_path: Path, clock: Clock
) -> None:
    with asyncio.Runner() as runner, StartupView() as view:
        while not view.has_been_ready:
            code = process.poll()
            if code is not None:
                raise _startup_error(code, log_path)
            state = folder.read_state()
            if state is not None and state.supervisor_pid == process.pid:
                view.show(state)
            runner.run(clock.sleep(POLL_SECONDS))


def _startup_error(code: int, log_path: Path) -> BatonError:
    lines = log_path.read_text(errors="replace").strip().splitlines()
    errors = [line.removeprefix("baton: ") for line in lines if line.startswith("baton: ")]
    message = errors[-1] if errors else f"the supervisor exited with code {code}; see {log_path}"
    return Invalid(message) if code == 2 else Unavailable(message)


def run_down(name: str) -> None:
    """Stop a cluster, and return when every process has exited."""
    folder = ClusterFolder(baton_home(), name)
    try:
        folder.signal_supervisor(signal.SIGTERM)
    except NotFound:
        print(f"no cluster named {name!r} is running")
        return
    clock = SystemClock()
    with asyncio.Runner() as runner:
        while folder.is_locked():
            runner.run(clock.sleep(POLL_SECONDS))
    print(f"cluster {name!r} is down")
