"""Build all kernels for CUDA, compare their results with the CPU's, and time them.

    python -m tools.gpu_check [--rounds 10] [--only PART …] [--quick] [--list]
                              [--json FILE] [--resume] [--jobs N]

Needs a GPU, and the packages torch, triton, transformers and safetensors with their dependencies.
Each part runs in a process of its own with a time limit, so that a part that raises an error,
crashes or hangs becomes a row with the error, and the other parts still run. Parts that check
results run ``--jobs`` at a time, because they mostly compile kernels; those that measure speed run
one after the other. Prints a table, and JSON as the last line. ``--json`` also writes the JSON to
FILE after every row, and ``--resume`` then skips the parts that FILE has whole. Exits with 1 if a
result is wrong or a part failed, and with 2 if there is no GPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tests.unit import cuda_cases
from tools import gpu_correctness, gpu_fp8, gpu_speed
from tools.gpu_cluster import cluster
from tools.gpu_cluster_speed import cluster_speed
from tools.gpu_determinism import KINDS, determinism
from tools.gpu_timing import GpuTableRow, rows_or_error
from tools.gpu_transport import transfers

ROOT = Path(__file__).parents[1]
STOP_SECONDS = 20.0
"""The time that a part gets to stop after its interruption."""


@dataclass(frozen=True)
class GpuCheckPart:
    """One part of the check. ``measure`` yields its rows. After ``timeout_seconds`` the part is
    stopped, and its remaining rows are missing. Parts with ``checks_results`` measure no time, so
    they may run at the same time as others."""

    measure: Callable[[], Iterable[GpuTableRow]]
    timeout_seconds: float
    checks_results: bool = False


Parts = dict[str, GpuCheckPart]


def parts_of(rounds: int) -> Parts:
    """Return the parts in the order in which they run: correctness first, and the longest
    measurements last."""

    def check(measure: Callable[[], Iterable[GpuTableRow]], seconds: float = 150) -> GpuCheckPart:
        return GpuCheckPart(measure, seconds, checks_results=True)

    return {
        "attention": check(gpu_correctness.attention_is_right),
        "layers": check(gpu_correctness.layers_are_right, 240),
        "sampling": check(gpu_correctness.sampling_is_right),
        "demo model": check(gpu_correctness.demo_tokens_are_equal),
        "demo model in FP8": check(gpu_correctness.tokens_in_fp8_are_equal),
        "architectures": check(gpu_correctness.architectures_are_right),
        "adapters": check(partial(_needs_engine, "adapters", _adapters)),
        **{f"determinism, {name}": check(partial(determinism, name), 240) for name in KINDS},
        "KV codecs": check(_codecs),
        "cluster": check(cluster, 180),
        "ceilings": GpuCheckPart(gpu_speed.ceilings, 30),
        "kv transfer": GpuCheckPart(lambda: transfers("cuda_ipc"), 60),
        "kv transfer with NIXL": GpuCheckPart(lambda: transfers("nixl"), 60),
        "speed of Qwen3-8B": GpuCheckPart(lambda: gpu_speed.models(rounds), 150),
        "speed of prefill attention": GpuCheckPart(lambda: gpu_speed.prefill_attention(rounds), 60),
        "speed of decode attention": GpuCheckPart(lambda: gpu_speed.decode_attention(rounds), 60),
        "speed of layer kernels": GpuCheckPart(lambda: gpu_speed.layer_kernels(rounds), 60),
        "speed of fixed products": GpuCheckPart(lambda: gpu_speed.products(rounds), 60),
        "speed of KV codecs": GpuCheckPart(partial(_codec_speeds, rounds), 60),
        "speed of sampling": GpuCheckPart(lambda: gpu_speed.sampling(rounds), 60),
        "speed of an engine": GpuCheckPart(
            partial(_needs_engine, "speed of an engine", partial(_engine_steps, rounds)), 120
        ),
        "speed of an engine under load": GpuCheckPart(
            partial(_needs_engine, "speed of an engine under load", _engine_load), 120
        ),
        "speed of FP8 weights": GpuCheckPart(lambda: gpu_fp8.weights(rounds), 150),
        "speed of FP8 KV": GpuCheckPart(lambda: gpu_fp8.kv(rounds), 150),
        "speed of a cluster": GpuCheckPart(cluster_speed, 300),
    }


def _needs_engine(name: str, measure: Callable[[], Iterable[GpuTableRow]]) -> Iterator[GpuTableRow]:
    """Yield the rows of a part whose engine logs, and so needs structlog."""
    if find_spec("structlog") is None:
        yield GpuTableRow(name, "not run: structlog is not installed")
        return
    yield from measure()


def _engine_steps(rounds: int) -> Iterable[GpuTableRow]:
    from tools.gpu_engine import engine_steps

    return engine_steps(rounds)


def _engine_load() -> Iterable[GpuTableRow]:
    from tools.gpu_engine_load import engine_load

    return engine_load()


def _adapters() -> Iterable[GpuTableRow]:
    from tools.gpu_adapters import adapters_are_right

    return adapters_are_right()


def _codecs() -> Iterable[GpuTableRow]:
    from tools.gpu_codecs import codecs_are_right

    return codecs_are_right()


def _codec_speeds(rounds: int) -> Iterable[GpuTableRow]:
    from tools.gpu_codecs import codec_speeds

    return codec_speeds(rounds)


@dataclass
class GpuReport:
    """The rows of the parts, and the time that each finished part took. ``file``, if any, is
    rewritten after every row."""

    about: dict[str, object]
    file: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self) -> None:
        """Take over the parts that ``file`` has."""
        if self.file is not None and self.file.exists():
            stored = json.loads(self.file.read_text())
            self.seconds, self.rows = stored["seconds"], stored["rows"]

    def begin(self, name: str) -> None:
        with self._lock:
            self.rows[name] = []

    def add(self, name: str, row: GpuTableRow) -> None:
        with self._lock:
            self.rows[name].append(asdict(row))
            self._write()

    def finish(self, name: str, seconds: float) -> None:
        with self._lock:
            self.seconds[name] = round(seconds, 1)
            self._write()

    def _write(self) -> None:
        if self.file is not None:
            self.file.write_text(self.to_json() + "\n")

    @property
    def ok(self) -> bool:
        return all(row["ok"] for rows in self.rows.values() for row in rows)

    def to_json(self) -> str:
        shown = {"ok": self.ok, "seconds": self.seconds, "rows": self.rows}
        return json.dumps({**self.about, **shown})


RunPart = Callable[[str, GpuCheckPart], Iterator[GpuTableRow]]
"""Runs a part and yields its rows."""


def run(
    parts: Parts,
    report: GpuReport,
    run_part: RunPart,
    jobs: int = 1,
    show: Callable[[str], None] = print,
) -> None:
    """Run the parts of the check that ``report`` does not have, and add them to it. Show each row,
    and the time that each part took."""

    def run_one(name: str) -> None:
        begun = time.perf_counter()
        report.begin(name)
        for row in run_part(name, parts[name]):
            report.add(name, row)
            show(str(row))
        seconds = time.perf_counter() - begun
        report.finish(name, seconds)
        show(f"-- {name}: {seconds:.1f} s")

    left = [name for name in parts if name not in report.seconds]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_one, [name for name in left if parts[name].checks_results]))
    for name in left:
        if not parts[name].checks_results:
            run_one(name)


def run_in_process(rounds: int) -> RunPart:
    """Return a function that runs a part in a process of its own."""

    def run_part(name: str, part: GpuCheckPart) -> Iterator[GpuTableRow]:
        command = [sys.executable, "-m", "tools.gpu_check", "--part", name, "--rounds", str(rounds)]
        return run_command(command, name, part.timeout_seconds)

    return run_part


def run_command(command: Sequence[str], name: str, timeout_seconds: float) -> Iterator[GpuTableRow]:
    """Run a command that prints the rows of the part ``name`` as lines of JSON, and yield them. If
    it fails or takes too long, add a row that says so. A part that takes too long is interrupted
    first, so that it can stop the processes that it has started."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            text=True,
        )
        signals = [
            threading.Timer(timeout_seconds, process.send_signal, [signal.SIGINT]),
            threading.Timer(timeout_seconds + STOP_SECONDS, process.kill),
        ]
        for timer in signals:
            timer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield GpuTableRow(**json.loads(line))
            process.wait()
            was_stopped = not signals[0].is_alive()
        finally:
            for timer in signals:
                timer.cancel()
            process.kill()
            process.wait()
            process.stdout.close()
        if process.returncode:
            status = f"exited with {process.returncode}"
            if was_stopped:
                status = f"was stopped after {timeout_seconds:.0f} s"
            errors.seek(0)
            last = "; ".join(errors.read().strip().splitlines()[-2:])
            yield GpuTableRow(name, f"the part {status}: {last}", ok=False)


def run_here(name: str, part: GpuCheckPart) -> Iterator[GpuTableRow]:
    """Run a part in this process. An error becomes a row."""
    yield from rows_or_error(name, _call_lazily(part.measure))


def _call_lazily(measure: Callable[[], Iterable[GpuTableRow]]) -> Iterator[GpuTableRow]:
    """Call ``measure`` only when rows are requested, so that its errors are raised within
    ``rows_or_error``."""
    yield from measure()


def chosen(parts: Parts, only: Sequence[str], *, quick: bool) -> Parts:
    """Return the parts to run. If ``only`` has an unknown part, raise SystemExit with the names of
    all parts."""
    if unknown := [name for name in only if name not in parts]:
        known = ", ".join(parts)
        raise SystemExit(f"gpu_check: unknown part {unknown[0]!r}; known parts: {known}")
    if only:
        return {name: part for name, part in parts.items() if name in only}
    return {name: part for name, part in parts.items() if part.checks_results or not quick}


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    parts = chosen(parts_of(options.rounds), options.only, quick=options.quick)
    if options.list:
        print("\n".join(parts))
        return 0
    if not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU here", file=sys.stderr)
        return 2
    if options.part:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" ignores it
        for row in run_here(options.part, parts[options.part]):
            print(json.dumps(asdict(row)), flush=True)
        return 0
    about = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "rounds": options.rounds,
        "seed": cuda_cases.SEED,
    }
    print(about, flush=True)
    report = GpuReport(about, options.json)
    if options.resume:
        report.load()
    run(parts, report, run_in_process(options.rounds), options.jobs)
    print(report.to_json())
    return 0 if report.ok else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="parts to run")
    parser.add_argument("--quick", action="store_true", help="check correctness only, not speed")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON to FILE")
    parser.add_argument("--resume", action="store_true", help="skip the parts that FILE has whole")
    parser.add_argument(
        "--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)),
        help="number of parts that run at the same time, if they check results",
    )  # fmt: skip
    parser.add_argument("--part", help=argparse.SUPPRESS)  # in a process of its own
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
