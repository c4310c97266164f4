"""Measure engines that share the machine's cores with each other and with other programs.

    python -m benchmarks.shared_cores [--shape 50m|0.6b] [--layers N] [--dtype bfloat16|float32]
                                      [--threads N] [--burners N] [--cases CASE …] [--rounds N]
                                      [--beside DIR]

Two processes with an engine of ``--threads`` threads each, and ``--burners`` processes that compute
all the time, run in four situations: one engine ``alone``, one ``beside burners``, ``two engines``,
and ``two engines beside burners``. In each, an engine repeats a case: ``prefill:1:512`` prefills a
prompt of 512 tokens, ``decode:8:512`` is a decode step of 8 answers behind 512 tokens each.

The fair time is what a perfectly fair scheduler would give: the median time alone, times the number
of threads that want to run, divided by the cores (or by an engine's threads, if those are more).
``--beside`` is a checkout of another version, whose engines take turns with this one's. Prints a
table, and JSON as the last line.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine import SHAPES, write_model
from benchmarks.machine import describe

ENGINE = Path(__file__).parent / "peers" / "engine_process.py"
HERE = Path(__file__).parents[1]
CASES = ("prefill:1:512", "prefill:1:4096")
BURN = "while True: pass"

Samples = dict[tuple[str, str, str], list[float]]
"""Times in seconds, by version, situation and case."""


@dataclass(frozen=True, slots=True)
class Situation:
    """How many engines run at the same time, and how many burners beside them."""

    name: str
    engines: int
    burners: int

    def slowdown(self, threads: int, cores: int) -> float:
        """Return the time under a perfectly fair scheduler, relative to the time of one engine
        alone, where each engine has ``threads`` threads that always want to run."""
        return max(1.0, (self.engines * threads + self.burners) / max(cores, threads))


def situations(burners: int) -> list[Situation]:
    return [
        Situation("alone", 1, 0),
        Situation("beside burners", 1, burners),
        Situation("two engines", 2, 0),
        Situation("two engines beside burners", 2, burners),
    ]


class EngineProcess:
    """An engine in a process of its own, which runs the source in ``tree``."""

    def __init__(self, tree: Path, model: Path, options: argparse.Namespace) -> None:
        command = [
            sys.executable, str(ENGINE), str(model), "--threads", str(options.threads),
            "--dtype", options.dtype, "--cases", *options.cases,
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
        )  # fmt: skip
        self.times()

    def start(self, case: str, seconds: float) -> None:
        assert self._process.stdin is not None
        print(case, seconds, file=self._process.stdin, flush=True)

    def times(self) -> list[float]:
        """Wait for the end of what was started; return the seconds of each repetition."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine exited with code {self._process.wait()}")
        times: list[float] = json.loads(line)
        return times

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Run ``count`` processes that compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(model: Path, options: argparse.Namespace) -> Samples:
    """Return the seconds of all repetitions, by version, situation and case."""
    trees = {"this": HERE} | ({"other": options.beside} if options.beside else {})
    samples: Samples = defaultdict(list)
    with ExitStack() as stack:
        engines = {}
        for version, tree in trees.items():
            engines[version] = [EngineProcess(tree, model, options) for _ in range(2)]
            for each in engines[version]:
                stack.callback(each.close)
        for number in range(options.rounds):
            order = list(trees)[:: 1 if number % 2 == 0 else -1]
            for situation in situations(options.burners):
                with burning(situation.burners):
                    for case in options.cases:
                        for version in order:
                            some = engines[version][: situation.engines]
                            for each in some:
                                each.start(case, options.seconds)
                            for each in some:
                                samples[version, situation.name, case] += each.times()
    return samples


def report_lines(samples: Samples, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a table of the samples; return its lines."""
    print(f"{'':50} version  p50 ms  p99 ms  mean ms  fair ms   ÷ fair: p50   p99      n")
    lines = list(_lines(samples, options, len(os.sched_getaffinity(0))))
    for line in lines:
        milliseconds = [line[name] * 1e3 for name in ("p50", "p99", "mean", "fair")]
        print(
            f"{line['situation']:27} {line['case']:22} {line['version']:7}"
            + "".join(f"{each:8.1f}" for each in milliseconds)
            + f" {line['of_fair']:14.2f} {line['p99_of_fair']:6.2f} {line['count']:6}"
        )
    return lines


def _lines(samples: Samples, options: argparse.Namespace, cores: int) -> Iterator[dict[str, Any]]:
    for situation in situations(options.burners):
        for case in options.cases:
            for version in dict.fromkeys(version for version, *_ in samples):
                times = samples[version, situation.name, case]
                alone = float(np.median(samples[version, "alone", case]))
                fair = alone * situation.slowdown(options.threads, cores)
                p50, p99 = np.percentile(times, [50, 99]).tolist()
                yield {
                    "situation": situation.name, "case": case, "version": version,
                    "p50": p50, "p99": p99, "mean": float(np.mean(times)), "count": len(times),
                    "fair": fair, "of_fair": p50 / fair, "p99_of_fair": p99 / fair,
                }  # fmt: skip


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="50m")
    parser.add_argument(
        "--layers", type=int, default=0, help="layers of the model; fewer take less time, 0: all"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="of each engine")
    parser.add_argument("--burners", type=int, default=4)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each case in a round")
    parser.add_argument("--beside", type=Path, help="a checkout of another version")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    report = {**describe(), **vars(options), "beside": str(options.beside or "")}
    print(report)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options)
        samples = measure(Path(folder), options)
    print(json.dumps({**report, "lines": report_lines(samples, options)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
