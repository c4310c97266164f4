"""Describes the machine and the commit, which benchmarks print with their figures, and measures
times."""

import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

SYSTEM_CLOCK = time.perf_counter

PROCESSOR_CLOCK = time.thread_time
"""The processor time of the calling thread, without the time for which other programs run."""


def describe() -> dict[str, object]:
    """Return the hardware and the commit."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    git = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "commit": commit,
    }


def median_seconds(action: Callable[[], object], rounds: int) -> float:
    """Return the median time of ``rounds`` calls, after one warm-up call."""
    action()
    times = []
    for _ in range(rounds):
        began = SYSTEM_CLOCK()
        action()
        times.append(SYSTEM_CLOCK() - began)
    return statistics.median(times)


def pause(seconds: float) -> None:
    """Sleep between two polls of a state whose changes are not notified."""
    threading.Event().wait(seconds)
