"""Print one table of prefill and decode on this CPU: Baton's kernels beside torch, vLLM, llama.cpp.

    python -m benchmarks.cpu_table [--shapes 50m 0.6b] [--threads 1 2] [--rounds N]
                                   [--vllm PYTHON [--vllm-eager]] [--llama PYTHON]

Runs ``benchmarks.engine`` for each shape and number of threads, one after the other: a prompt of
512 and one of 4,096 tokens, and decode steps of 1, 8 and 32 answers behind 512 tokens. Times are
milliseconds by the wall clock, medians of the rounds, in which the engines take turns. torch is
Baton's engine with ``cpu_kernels=off``. Prints a Markdown table with the machine, the commit and
the ceilings, and JSON as the last line.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from testkit.machine import describe

CONTENDERS = ("kernels", "torch", "vllm", "llama.cpp")
CASES = (("prefill", 1, 512), ("prefill", 1, 4096), *(("decode", n, 512) for n in (1, 8, 32)))


def run(shape: str, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON of one run of ``benchmarks.engine``."""
    command = [sys.executable, "-m", "benchmarks.engine", "--without", "transformers"]
    command += ["--shape", shape, "--threads", str(threads), "--rounds", str(options.rounds)]
    command += ["--contexts", "512", "4096"]
    command += ["--decode-contexts", "512", "--batches", "1", "8", "32"]
    command += ["--instructions", options.instructions] if options.instructions else []
    for name in ("vllm", "llama"):
        if python := getattr(options, name):
            command += [f"--{name}", python]
    command += ["--vllm-eager"] if options.vllm_eager else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table_rows(shape: str, threads: int, result: dict[str, Any]) -> Iterator[str]:
    """Yield a row for each case: the milliseconds of each contender that was there, and their times
    divided by those of Baton's kernels."""
    found = {(each["kind"], each["batch"], each["context"]): each for each in result["lines"]}
    for case in CASES:
        if (line := found.get(case)) is None:
            continue
        seconds = line["seconds_by_contender"]
        ours = seconds["kernels"]["wall"]
        cells = [f"{shape}, {threads} thread{'s' if threads > 1 else ''}", _name(*case)]
        for name in CONTENDERS:
            wall = seconds[name]["wall"] if name in seconds else None
            ratio = f" ({wall / ours:.2f} ×)" if wall and name != "kernels" else ""
            cells.append(f"{wall * 1e3:,.1f}{ratio}" if wall else "")
        cells.append(f"{line['share_of_roof']:.0%} of {line['bound']}")
        yield f"| {' | '.join(cells)} |"


def _name(kind: str, batch: int, context: int) -> str:
    return (
        f"prefill {context:,}" if kind == "prefill" else f"decode behind {context}, batch {batch}"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["50m", "0.6b"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm", help="an interpreter that has vLLM for CPUs")
    parser.add_argument(
        "--vllm-eager", action="store_true", help="don't let vLLM compile the model"
    )
    parser.add_argument("--llama", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--instructions", help="the most that Baton's kernels use")
    options = parser.parse_args(arguments)
    machine, results = describe(), []
    print(machine)
    print(f"| shape | ms | {' | '.join(CONTENDERS)} | of the ceiling |")
    print("|---" * (len(CONTENDERS) + 3) + "|", flush=True)
    for shape in options.shapes:
        for threads in options.threads:
            result = run(shape, threads, options)
            print("\n".join(table_rows(shape, threads, result)), flush=True)
            results.append(result)
    for result in results:
        print(f"{result['shape']}, {result['threads']}: {result['lines'][-1]['ceilings']}")
    print(json.dumps({**machine, **vars(options), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
