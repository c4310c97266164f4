"""Shows the progress of ``baton up``: as bars on a terminal, as lines elsewhere."""

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from orchestrator.cluster_state import ClusterState, ProcessState


class StartupView:
    """Shows the progress of the cluster's start. Once the cluster is ready, it prints a line each
    time the state of a process changes."""

    def __init__(self) -> None:
        self.has_been_ready = False
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description:12}"),
            BarColumn(),
            TextColumn("{task.fields[doing]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bars: dict[str, TaskID] = {}
        self._lines: dict[str, str] = {}
        self._obstacle = ""

    def __enter__(self) -> "StartupView":
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def show(self, state: ClusterState) -> None:
        for process in state.processes:
            if self._console.is_terminal and not self.has_been_ready:
                self._update_bar(process)
            elif self._lines.get(process.id) != describe_progress(process, with_weights=False):
                self._lines[process.id] = describe_progress(process, with_weights=False)
                print(f"{process.id}: {self._lines[process.id]}", flush=True)
        if state.obstacle not in ("", self._obstacle):
            self._obstacle = state.obstacle
            self._console.print(f"waiting: {state.obstacle}", markup=False, soft_wrap=True)
        if state.ready and not self.has_been_ready:
            self.has_been_ready = True
            self._lines = {
                process.id: describe_progress(process, with_weights=False)
                for process in state.processes
            }
            self._progress.stop()
            print(welcome(state.url), flush=True)
            sys.stdout.flush()

    def _update_bar(self, process: ProcessState) -> None:
        if process.id not in self._bars:
            self._bars[process.id] = self._progress.add_task(process.id, total=1.0, doing="")
        self._progress.update(
            self._bars[process.id],
            completed=startup_fraction(process),
            doing=describe_progress(process),
        )


def startup_fraction(process: ProcessState) -> float:
    """Return how much of a process's start is done, from 0 to 1. Most of it is the loading of the
    weights."""
    if process.state != "starting":
        return 1.0 if process.state == "serving" else 0.0
    return 0.95 * process.loaded_bytes / process.total_bytes if process.total_bytes else 0.0


def describe_progress(process: ProcessState, with_weights: bool = True) -> str:
    if process.state == "pending" and process.message:
        return f"pending: {process.message}"
    if with_weights and process.state == "starting" and process.total_bytes:
        done, total = process.loaded_bytes / 1e6, process.total_bytes / 1e6
        return f"loading weights, {done:,.0f} of {total:,.0f} MB"
    return process.state


def welcome(url: str) -> str:
    return (
        f"Baton is ready at {url}\n"
        f"  curl {url}/v1/completions -H 'content-type: application/json' \\\n"
        '    -d \'{"prompt": "def read(path):", "max_tokens": 40, "temperature": 0}\''
    )
