"""A process with Baton's engine that runs benchmark cases on command, for
``benchmarks.shared_cores``.

    python benchmarks/peers/engine_process.py MODEL_DIR --threads N --dtype D --cases CASE …

It imports ``baton`` from PYTHONPATH, which may be another version than the benchmark's. A case is
KIND:BATCH:CONTEXT, as in ``prefill:1:512``. Each line of the input is a case and the seconds for
which it is repeated; the answer is a line with the seconds of each repetition, as a JSON list.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

BLOCK_TOKENS = 16
CHUNK_TOKENS = 512


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--cases", nargs="+", required=True)
    options = parser.parse_args(arguments)
    actions = _load(options)
    print(json.dumps([]), flush=True)
    for line in sys.stdin:
        case, seconds = line.split()
        print(json.dumps(_repeat(actions[case], float(seconds))), flush=True)
    return 0


def _load(options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Load the model, and return an action for each case, which has been run once."""
    from baton.config.environment import set_thread_environment

    set_thread_environment(options.threads)  # before torch is imported
    import torch

    from baton.engine.bench.bench_case import BenchCase, Kind
    from baton.engine.bench.bench_runner import BenchRunner, max_blocks
    from baton.engine.runner import ModelRunner
    from baton.engine.runner_options import RunnerOptions

    torch.set_num_threads(options.threads)
    cases = {}
    for name in options.cases:
        kind, batch, context = name.split(":")
        cases[name] = BenchCase(cast(Kind, kind), int(batch), int(context))
    blocks = max_blocks(list(cases.values()), BLOCK_TOKENS)
    chosen = RunnerOptions(
        device="cpu", dtype=options.dtype, num_blocks=blocks + 1, block_tokens=BLOCK_TOKENS
    )
    bench = BenchRunner(ModelRunner.load(options.model, chosen), CHUNK_TOKENS, seed=1)
    actions = {name: bench.make_action(case) for name, case in cases.items()}
    for action in actions.values():
        action()
    return actions


def _repeat(action: Callable[[], object], seconds: float) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
