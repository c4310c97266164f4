"""``baton up``, ``down``, ``scale``, ``drain``: the local cluster."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from baton.clock import SystemClock
from baton.config import Settings, child_environment, home, to_environment
from baton.errors import BatonError, Invalid, NotFound, Unavailable
from baton.obs.logs import set_up_logs
from baton.runtime.child import baton_command
from baton.runtime.control import ask, open_control
from baton.runtime.state import ClusterFolder
from baton.runtime.supervisor import Supervisor

POLL_SECONDS = 0.05


def run_up(settings: Settings, name: str, detach: bool) -> None:
    """Raises what keeps the cluster from starting."""
    from baton.checkpoint import load_model_config, resolve_model

    load_model_config(resolve_model(settings.model))  # a wrong one is told before all else
    folder = ClusterFolder(home(), name)
    if detach:
        _detach(settings, folder, name)
    else:
        asyncio.run(_supervise(settings, folder))


async def _supervise(settings: Settings, folder: ClusterFolder) -> None:
    set_up_logs(settings.log_level if not sys.stderr.isatty() else "warning", settings.log_format)
    folder.take()
    stop, stop_now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (stop_now if stop.is_set() else stop).set())
    view = _View()
    supervisor = Supervisor(settings, folder, SystemClock(), lambda: view.show(supervisor, stop))
    try:
        control = await open_control(folder.socket, supervisor)
        try:
            with view:
                await supervisor.run(stop, stop_now)
        finally:
            control.close()
    finally:
        folder.release()


class _View:
    """Bars on a terminal, lines elsewhere, until the cluster is ready."""

    def __init__(self) -> None:
        self._console = Console(stderr=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:12}"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bars: dict[str, TaskID] = {}
        self._states: dict[str, str] = {}
        self._was_ready = False

    def __enter__(self) -> None:
        self._progress.start()

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def show(self, supervisor: Supervisor, stop: asyncio.Event) -> None:
        for child_id, child in list(supervisor.children.items()):
            state = child.state.state
            if self._states.get(child_id) != state:
                self._states[child_id] = state
                if not self._console.is_terminal:
                    print(f"{child_id}: {state}", flush=True)
            if not self._was_ready:
                self._update(child_id, state, child.progress)
        if supervisor.ready and not self._was_ready:
            self._was_ready = True
            self._progress.stop()
            print(welcome(supervisor.url), flush=True)
        elif stop.is_set() and self._was_ready and self._console.is_terminal:
            self._console.print("[dim]draining …[/]", end="\r")

    def _update(self, child_id: str, state: str, progress: tuple[int, int]) -> None:
        done, total = progress
        if child_id not in self._bars:
            self._bars[child_id] = self._progress.add_task(child_id, total=1.0, state=state)
        share = 1.0 if state == "serving" else 0.9 * done / total if total else 0.0
        self._progress.update(self._bars[child_id], completed=share, state=state)


def welcome(url: str) -> str:
    return (
        f"Baton is ready at {url}\n"
        f"  curl {url}/v1/completions -H 'content-type: application/json' \\\n"
        '    -d \'{"prompt": "def read(path):", "max_tokens": 40, "temperature": 0}\''
    )


def _detach(settings: Settings, folder: ClusterFolder, name: str) -> None:
    """A supervisor in a session of its own; returns when it is ready."""
    if folder.is_owned():
        raise Invalid(f"a cluster named {name!r} is running already: `baton down`")
    folder.logs.mkdir(parents=True, exist_ok=True)
    log_path = folder.logs / "supervisor.log"
    with log_path.open("wb") as log_file:
        process = subprocess.Popen(
            baton_command("up", "--name", name),
            env=child_environment(to_environment(settings), {}),
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await_ready(process, folder, log_path)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def _await_ready(process: "subprocess.Popen[bytes]", folder: ClusterFolder, log_path: Path) -> None:
    clock = SystemClock()
    shown: dict[str, str] = {}
    with asyncio.Runner() as runner:
        while True:
            code = process.poll()
            if code is not None:
                raise _failure(code, log_path)
            state = folder.read()
            if state is not None and state.supervisor_pid == process.pid:
                for entry in state.processes:
                    if shown.get(entry.id) != entry.state:
                        shown[entry.id] = entry.state
                        print(f"{entry.id}: {entry.state}", flush=True)
                if state.ready:
                    print(welcome(state.url))
                    return
            runner.run(clock.sleep(POLL_SECONDS))


def _failure(code: int, log_path: Path) -> BatonError:
    lines = log_path.read_text(errors="replace").strip().splitlines()
    told = [line.removeprefix("baton: ") for line in lines if line.startswith("baton: ")]
    message = told[-1] if told else f"the supervisor ended with code {code}; see {log_path}"
    return Invalid(message) if code == 2 else Unavailable(message)


def run_down(name: str) -> None:
    """Returns when every process has ended."""
    folder = ClusterFolder(home(), name)
    try:
        folder.signal_owner(signal.SIGTERM)
    except NotFound:
        print(f"no cluster named {name!r} is running")
        return
    clock = SystemClock()
    with asyncio.Runner() as runner:
        while folder.is_owned():
            runner.run(clock.sleep(POLL_SECONDS))
    print(f"cluster {name!r} is down")


def run_scale(name: str, pools: list[str]) -> None:
    wanted: dict[str, int] = {}
    for pool in pools:
        role, equals, count = pool.partition("=")
        if not equals or not count.isdigit():
            raise Invalid(f"scale takes prefill=N and decode=N, not {pool!r}")
        wanted[role] = int(count)
    folder = ClusterFolder(home(), name)
    folder.running()
    ask(folder.socket, {"command": "scale", "pools": wanted})
    print("scaling: " + ", ".join(f"{role} to {count}" for role, count in wanted.items()))


def run_drain(name: str, worker: str) -> None:
    folder = ClusterFolder(home(), name)
    folder.running()
    ask(folder.socket, {"command": "drain", "worker": worker})
    print(f"draining {worker}")
