"""Compare steps in which rows use LoRA adapters with the same steps of the base model alone.

    python -m benchmarks.lora [--model DIR | --shape 50m|0.6b] [--dtype float32|bfloat16]
                              [--threads N] [--rank N] [--adapters N …] [--rows N]
                              [--context N] [--prompt N] [--rounds N]

Measures a decode step with ``--rows`` rows, half of which use adapters, and a prefill step of
``--prompt`` tokens, half of which belong to prompts with adapters. Both have 0, 1, 4 and 16
different adapters (``--adapters``) for all projections. The numbers of adapters take turns in each
round. Reports the median time of each, and the median over the rounds of its ratio to the same
round without adapters. Prints a table, and JSON as the last line.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from baton.checkpoints.checkpoint import load_model_config
from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.plan import Plan, Row
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from benchmarks.engine import write_model
from testkit.lora_zoo import make_adapter
from testkit.machine import SYSTEM_CLOCK, describe

BLOCK_TOKENS = 16
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def decode_plan(rows: int, context: int, adapters: list[bytes]) -> Plan:
    """Return a step that decodes a token of ``rows`` requests; the second half of them use
    ``adapters``, in groups."""
    return _plan([1] * rows, context, adapters)


def prefill_plan(tokens: int, num_prompts: int, adapters: list[bytes]) -> Plan:
    """Return a step that computes ``num_prompts`` prompts with ``tokens`` tokens in total; the
    second half of them use ``adapters``."""
    return _plan([tokens // num_prompts] * num_prompts, 0, adapters)


def _plan(lengths: list[int], start: int, adapters: list[bytes]) -> Plan:
    half = len(lengths) // 2
    rows = []
    for number, length in enumerate(lengths):
        adapter = (
            adapters[(number - half) * len(adapters) // half]
            if number >= half and adapters
            else b""
        )
        blocks = -(-(start + length) // BLOCK_TOKENS)
        table = tuple(BlockId(number * blocks + index) for index in range(blocks))
        tokens = tuple(TokenId(7 + 3 * index % 900) for index in range(length))
        rows.append(
            Row(RequestId(str(number)), tokens, start, table, True, GREEDY, adapter=adapter)
        )
    return Plan(1, tuple(rows))


def measure(
    runner: ModelRunner, plans: dict[int, Plan], rounds: int
) -> dict[int, tuple[float, float]]:
    """Return the median seconds of each plan, and its median ratio to the plan with key 0."""
    seconds: dict[int, list[float]] = {number: [] for number in plans}
    for number in range(rounds + 1):
        for key, plan in plans.items():
            began = SYSTEM_CLOCK()
            runner.run(plan)
            if number:  # the first round is a warm-up
                seconds[key].append(SYSTEM_CLOCK() - began)
    return {
        key: (
            statistics.median(times),
            statistics.median(a / b for a, b in zip(times, seconds[0], strict=True)),
        )
        for key, times in seconds.items()
    }


def run(path: Path, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    runner = ModelRunner.load(
        path,
        RunnerOptions(
            device="cpu",
            dtype=options.dtype,
            num_blocks=options.rows * (options.context // BLOCK_TOKENS + 1)
            + options.prompt // BLOCK_TOKENS + 64,
            block_tokens=BLOCK_TOKENS,
            max_adapters=max(options.adapters),
        ),
    )  # fmt: skip
    digests = []
    for number in range(max(options.adapters)):
        adapter = make_adapter(folder / str(number), path, seed=number, rank=options.rank)
        loaded = runner.load_adapter(adapter)
        runner.adapters.add(loaded)
        digests.append(loaded.digest)
    prompts = 2 * max(options.adapters)
    works = {
        "decode": {
            n: decode_plan(options.rows, options.context, digests[:n]) for n in options.adapters
        },
        "prefill": {
            n: prefill_plan(options.prompt, prompts, digests[:n]) for n in options.adapters
        },
    }
    results: dict[str, object] = {"adapter_bytes": runner.adapters.size_bytes // len(digests)}
    for work, plans in works.items():
        figures = measure(runner, plans, options.rounds)
        for number, (seconds, ratio) in figures.items():
            print(f"{work:8} {number:3} adapters  {seconds * 1e3:9.2f} ms  x {ratio:.3f}")
        results[work] = {
            str(number): {"seconds": seconds, "ratio": ratio}
            for number, (seconds, ratio) in figures.items()
        }
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", default="50m")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or Path(folder) / "model"
        if options.model is None:
            write_model(path, options)
        config = load_model_config(path)
        print(f"{config.architecture}, {config.num_layers} layers of {config.hidden_size}")
        results = run(path, Path(folder), options)
    print(json.dumps({**describe(), **vars(options), "model": str(options.model), **results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
