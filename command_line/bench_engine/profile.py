"""Measures the steps of an engine for ``baton bench engine --profile``, and writes the table of
costs that ``baton simulate --costs`` reads."""

import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.checkpoints.hub import resolve_model
from baton.config.config_version import program_version
from baton.engine.bench.bench_runner import BenchRunner, num_blocks_for_step
from baton.engine.bench.profile_step import ProfileStep, profile_steps
from baton.engine.bench.stopwatch import Action, ElapsedTime, time_mean, time_once
from baton.engine.native.processor import model_name
from baton.engine.runner import ModelRunner, pick_dtype
from baton.reports.console import open_console
from baton.worker.engine_settings import runner_options
from command_line.bench_engine.config import EngineBenchConfig
from command_line.bench_engine.profile_table import print_profile
from simulator.cost_table import CostTable

TURN_SECONDS = 0.01
MAX_REPEATS = 50
"""In each round, a short step is repeated until it has taken TURN_SECONDS, but at most this often:
the first repetition finds cold caches."""


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """The measured steps, with the median of each one's seconds."""

    about: str
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    steps: tuple[tuple[ProfileStep, float], ...]

    def as_dict(self) -> dict[str, object]:
        """Return the table, in the form of :class:`simulator.cost_table.CostTable`. Steps that were
        held out are in a list of their own, which nothing reads."""

        def rows(kind: str) -> list[dict[str, float]]:
            return [
                step.row(seconds)
                for step, seconds in self.steps
                if step.kind == kind and not step.held_out
            ]

        held_out = [step.row(seconds) for step, seconds in self.steps if step.held_out]
        return {
            "about": self.about,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_capacity_tokens": self.kv_capacity_tokens,
            **{kind: rows(kind) for kind in ("prefill", "decode", "mixed")},
            "held_out": held_out,
        }

    def table(self) -> CostTable:
        return CostTable.parse(json.dumps(self.as_dict()), "the profile")


def run_profile(config: EngineBenchConfig, path: Path, show: Callable[[str], None]) -> None:
    """Measure the steps, write the table to ``path``, and print how well the costs that are fitted
    to it explain the steps. Raises Invalid if the model or its pool is too small."""
    profile = _measure(config, show)
    path.write_text(json.dumps(profile.as_dict(), indent=1) + "\n", encoding="utf-8")
    print_profile(open_console(), profile.about, profile.steps, profile.table().costs())


def _measure(options: EngineBenchConfig, show: Callable[[str], None]) -> MeasuredProfile:
    settings = options.settings
    model = resolve_model(settings.model)
    show(f"loading {model.name}")
    runner = ModelRunner.load(model, runner_options(settings))
    chunk = min(settings.chunk_tokens or settings.max_batched_tokens, settings.max_batched_tokens)
    capacity = runner.num_blocks // runner.num_groups * runner.block_tokens
    steps = profile_steps(chunk, runner.limits.max_position_embeddings, capacity)
    num_blocks = max(num_blocks_for_step(step, runner.block_tokens) for step in steps)
    bench_runner = BenchRunner(runner, chunk, options.seed, num_blocks * runner.num_groups)
    actions = [bench_runner.make_step(step) for step in steps]
    cpu_seconds = _computes_alone(runner)
    max_seconds = options.seconds * len(steps)
    seconds = _measure_in_turns(actions, options.rounds, max_seconds, cpu_seconds, show)
    config, device = runner.model_config, runner.pool.tensor.device
    dtype = pick_dtype(settings.dtype, device, config)
    element_bytes = runner.pool.tensor.element_size()
    return MeasuredProfile(
        about=_about(model, runner, str(dtype).removeprefix("torch."), options.rounds),
        kv_bytes_per_token=config.kv_elements_per_token * element_bytes,
        kv_capacity_tokens=capacity,
        steps=tuple(zip(steps, seconds, strict=True)),
    )


def _measure_in_turns(
    actions: Sequence[Action],
    rounds: int,
    max_seconds: float,
    cpu_seconds: bool,
    show: Callable[[str], None],
) -> list[float]:
    """Return the median seconds of each action: of CPU time if ``cpu_seconds``, otherwise by the
    wall clock. In each round, all take turns, so that other load on the machine disturbs all alike.
    No round starts after ``max_seconds``."""
    show("warming up")
    counts = [_repeats(action) for action in actions]
    times: list[list[float]] = [[] for _ in actions]
    began = time.perf_counter()
    for number in range(rounds):
        if number and time.perf_counter() - began > max_seconds:
            break
        show(f"round {number + 1} of {rounds}")
        for action, count, found in zip(actions, counts, times, strict=True):
            found.append(_seconds(time_mean(action, count), cpu_seconds))
    return [statistics.median(found) for found in times]


def _seconds(elapsed: ElapsedTime, cpu_seconds: bool) -> float:
    return elapsed.cpu if cpu_seconds else elapsed.wall


def _repeats(action: Action) -> int:
    action()
    once = max(time_once(action).wall, 1e-9)
    return min(max(math.ceil(TURN_SECONDS / once), 1), MAX_REPEATS)


def _computes_alone(runner: ModelRunner) -> bool:
    """Whether a single thread of a CPU computes the steps. Its CPU time is then the time of a step
    on a machine without other load, which disturbs it less than the time by the wall clock."""
    return runner.pool.tensor.device.type == "cpu" and torch.get_num_threads() == 1


def _about(model: Path, runner: ModelRunner, dtype: str, rounds: int) -> str:
    device = runner.pool.tensor.device
    on_gpu = device.type == "cuda"
    machine = torch.cuda.get_device_name(device) if on_gpu else model_name()
    threads = "" if on_gpu else f", threads: {torch.get_num_threads()},"
    clock = "CPU seconds" if _computes_alone(runner) else "seconds by the wall clock"
    return (
        f"measured on {machine}{threads} with `baton bench engine --profile` at {_commit()}, torch "
        f"{torch.__version__}; {model.name}, {dtype}, quantization {runner.quantization}, KV in "
        f"{runner.kv_dtype}; computed by {runner.description}; steps of the model runner alone, "
        f"{clock}, medians of up to {rounds} rounds; capacity: the KV pool of these settings"
    )


def _commit() -> str:
    """Return the commit of the source, or Baton's version if it is installed without git."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=8"]
    try:
        found = subprocess.run(
            git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return f"version {program_version()}"
    return found.stdout.strip() or f"version {program_version()}"
