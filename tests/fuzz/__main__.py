"""Run all fuzzers within a time budget: `make fuzz SECONDS=… SEED=…`.

    python -m tests.fuzz [--seconds 120] [--seed S] [--only NAME …]

Runs every fuzzer in tests/fuzz in its own process, one after the other. Each gets an equal share of
the seconds, not counting its start-up. If a process crashes, this counts as a crash; if it does not
exit in time, it counts as a hang. Prints a table, and JSON as the last line. Exits with 1 if there
was a crash, a hang or a 5xx error that the server itself caused.
"""

import argparse
import faulthandler
import importlib
import json
import os
import pkgutil
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import tests.fuzz
from testkit.machine import SYSTEM_CLOCK, describe
from tests.fuzz.result import FuzzResult

GRACE_SECONDS = 60.0
"""How much longer than its share of the seconds a fuzzer may take, for its start-up and exit,
before it counts as hanging."""

Fuzz = Callable[[float, int], FuzzResult]


@dataclass(frozen=True)
class Fuzzer:
    """A module of tests/fuzz; ``fuzz(seconds, seed)`` runs it."""

    name: str
    fuzz: Fuzz


def find_fuzzers() -> list[Fuzzer]:
    """Return all fuzzers, sorted by name."""
    found = []
    for entry in pkgutil.iter_modules(tests.fuzz.__path__):
        if entry.name.startswith("test_"):
            continue
        module = importlib.import_module(f"{tests.fuzz.__name__}.{entry.name}")
        if hasattr(module, "NAME") and hasattr(module, "fuzz"):
            found.append(Fuzzer(str(module.NAME), cast(Fuzz, module.fuzz)))
    return sorted(found, key=lambda fuzzer: fuzzer.name)


def run_in_subprocess(name: str, seconds: float, seed: int) -> FuzzResult:
    """Run one fuzzer in its own process."""
    command = [sys.executable, "-m", "tests.fuzz", "--inside", "--only", name]
    command += ["--seconds", str(seconds), "--seed", str(seed)]
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as folder:
        try:
            ended = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds + GRACE_SECONDS,
                env={**_environment(), "TMPDIR": folder},
            )
        except subprocess.TimeoutExpired as hung:
            stacks = (hung.stderr or b"")[-3000:]
            text = stacks.decode(errors="replace") if isinstance(stacks, bytes) else stacks
            why = f"did not exit in time\n{text}"
            return FuzzResult(0, 0, 1, 0, (_last_case(folder, name, seed, why),))
        lines = ended.stdout.splitlines()
        if ended.returncode == 0 and lines and lines[-1].startswith("{"):
            fields = json.loads(lines[-1])
            return FuzzResult(**fields | {"examples": tuple(fields["examples"])})
        why = f"exit code {ended.returncode}\n{ended.stderr[-3000:]}"
        return FuzzResult(0, 1, 0, 0, (_last_case(folder, name, seed, why),))


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    if options.inside:
        return _run_inside(options)
    fuzzers = [f for f in find_fuzzers() if not options.only or f.name in options.only]
    print(describe(), f"seed {options.seed}", flush=True)
    began = SYSTEM_CLOCK()
    results: dict[str, FuzzResult] = {}
    share = options.seconds / max(len(fuzzers), 1)
    for fuzzer in fuzzers:
        print(f"{fuzzer.name} for {share:.0f} s", flush=True)
        results[fuzzer.name] = result = run_in_subprocess(fuzzer.name, share, options.seed)
        for example in result.examples:
            print(f"  {example}", flush=True)
    _show(results)
    clean = all(result.is_clean for result in results.values())
    figures = {name: asdict(result) for name, result in results.items()}
    seconds = round(SYSTEM_CLOCK() - began, 1)
    print(json.dumps({"ok": clean, "seed": options.seed, "seconds": seconds, "fuzzers": figures}))
    return 0 if clean else 1


def _environment() -> dict[str, str]:
    """Return this process's environment without Baton's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}


def _last_case(folder: str, name: str, seed: int, why: str) -> str:
    """Return ``why``, followed by the case that a fuzzer was running when it crashed or hung, if
    the fuzzer has written it to ``folder``."""
    cases = [file.read_text() for file in Path(folder).glob("*.case")]
    return "\n".join([f"{name} seed={seed}: {why}", *cases])


def _run_inside(options: argparse.Namespace) -> int:
    """Run, in this process, the fuzzer that the options name, and print its result as the last
    line."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(options.seconds + GRACE_SECONDS - 10)
    [fuzzer] = [f for f in find_fuzzers() if f.name in options.only]
    print(json.dumps(asdict(fuzzer.fuzz(options.seconds, options.seed))))
    return 0


def _show(results: dict[str, FuzzResult]) -> None:
    print(f"{'fuzzer':16} {'cases':>10} {'crashes':>8} {'hangs':>8} {'own 5xx':>8}")
    for name, result in results.items():
        counts = f"{result.crashes:8} {result.hangs:8} {result.server_errors:8}"
        print(f"{name:16} {result.cases:10} {counts}")


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="for all fuzzers in total")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    parser.add_argument("--only", nargs="+", default=[], choices=[f.name for f in find_fuzzers()])
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
