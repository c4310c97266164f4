"""Check with random placements that requests get the same bits in any batch and on any worker.

    python -m tests.determinism [--placements N] [--architectures …] [--dtypes …] [--seed N]
                                [--kernels on|off] [--instructions …] [--cost]

Each placement has a random block size and two workers with stale data in their pools, each with a
random number of threads and one of the instruction sets ``--instructions`` (default: all that give
the bits of this processor's best one). They run several requests in random steps: in any batch, in
chunks of any size, token by token. Some requests start from a prefix that another one has computed,
which ends at a block boundary or within a block; others move with their KV to the other worker,
after the prefill or in the middle of the answer. Every token's logits must have the same bits as
when its prompt is computed alone, in one chunk, on one thread, with the first of the instruction
sets. ``--kernels off`` checks torch's kernels instead, which don't guarantee this.

With ``--cost``, it then measures the cost of determinism in CPU seconds: our matrix products, which
give the same bits in any batch, against torch's (oneDNN), which don't, on the same weights. Prints
tables, and JSON as the last line. Exits with 1 if a bit differs.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
import torch

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.attention.base import pack_batch
from baton.engine.native.matrix import KernelThreadPool, PackedMatrix
from baton.engine.native.processor import (
    EMULATED_AMX,
    INSTRUCTION_SETS,
    best_instruction_set,
    limit_instruction_set,
    sets_with_bits_of,
)
from baton.engine.plan import Row
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from testkit.machine import describe
from testkit.model_zoo import make_model

SEED = 20261121
ARCHITECTURES = {
    "qwen2": 0.25, "qwen3": 0.25, "llama3-rope": 0.2, "gemma3": 0.2, "qwen3-moe": 0.05,
    "gpt-oss": 0.05,
}  # fmt: skip
"""The architectures and their shares of the placements. Models with experts have a smaller share,
since torch computes experts one by one, which takes longer."""

LENGTHS = (1, 5, 64, 65, 130, 190)
POOL_TOKENS = 1024
BLOCKS = (1, 3, 16, 64)
GREEDY = SamplingParams(max_tokens=1)

COST_SIZES = ((512, 1024), (512, 3072), (1536, 512), (1024, 4096), (1024, 6144), (3072, 1024))
"""Inputs and outputs of the matrices whose products are compared: those of the shapes 50m and 0.6b
of ``benchmarks.engine``."""

COST_ROWS = (1, 8, 32, 128, 512, 4096)


class BitsDiffer(Exception):
    """The logits of some tokens differ from the expected ones; the message says which."""


@dataclass
class RandomRequest:
    """A request in progress. ``blocks`` are its blocks on ``worker``. ``done`` is the number of
    tokens computed so far. ``wanted`` has the expected logits of each token."""

    tokens: list[int]
    wanted: torch.Tensor
    worker: "RandomWorker"
    blocks: list[int]
    done: int = 0


class RandomWorker:
    """A runner with stale data in its pool. Its blocks are allocated in random order."""

    def __init__(self, runner: ModelRunner, num_threads: int, chance: np.random.Generator) -> None:
        self.runner = runner
        self.num_threads = num_threads
        runner.pool.tensor.fill_(float("nan"))
        self.free: list[int] = chance.permutation(runner.num_blocks).tolist()

    def allocate(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // self.runner.block_tokens) * self.runner.num_groups
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "the pool is too small"
        return taken


class RandomPlacement:
    """Runs requests in random steps on some workers. ``events`` counts the steps, rows and logits,
    and how often prefixes were reused and requests moved."""

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        chance: np.random.Generator,
        *,
        kernels: str = "on",
        instructions: Sequence[str],
        num_workers: int = 2,
    ) -> None:
        self.chance = chance
        self.instructions = instructions
        self.block_tokens = int(chance.choice(BLOCKS))
        self.workers = [self._worker(path, dtype, kernels) for _ in range(num_workers)]
        self.streams: list[RandomRequest] = []
        self.events: Counter[str] = Counter()

    def _worker(self, path: Path, dtype: torch.dtype, kernels: str) -> RandomWorker:
        threads = int(self.chance.integers(1, 4))
        torch.set_num_threads(threads)
        processor = str(self.chance.choice(list(self.instructions)))
        size = {"num_blocks": POOL_TOKENS // self.block_tokens, "block_tokens": self.block_tokens}
        with limit_instruction_set(processor):
            return RandomWorker(load(path, dtype, kernels, **size), threads, self.chance)

    def add(self, tokens: list[int], wanted: torch.Tensor) -> RandomRequest:
        worker = self.workers[int(self.chance.integers(len(self.workers)))]
        self.streams.append(RandomRequest(tokens, wanted, worker, worker.allocate(len(tokens))))
        return self.streams[-1]

    def add_sharing_request(self) -> None:
        """Add a request that shares the computed prefix of another one. If the prefix ends within a
        block, that block is copied, since the new request will write to it."""
        source = self.streams[int(self.chance.integers(len(self.streams)))]
        heir = self.add(source.tokens, source.wanted)
        heir.done = min(source.done, len(source.tokens) - 1)
        num_groups = heir.worker.runner.num_groups
        whole = heir.done // self.block_tokens * num_groups if heir.worker is source.worker else 0
        heir.blocks[:whole] = source.blocks[:whole]
        self._copy(source, heir, whole)
        self.events["reused"] += heir.done > 0

    def migrate(self) -> None:
        """Move a random request and its KV to another worker. Do nothing if none of its tokens is
        computed yet or the other worker lacks space."""
        stream = self.streams[int(self.chance.integers(len(self.streams)))]
        target = self.workers[int(self.chance.integers(len(self.workers)))]
        needed = -(-len(stream.tokens) // self.block_tokens) * target.runner.num_groups
        if target is stream.worker or not stream.done or needed > len(target.free):
            return
        before = RandomRequest(
            stream.tokens, stream.wanted, stream.worker, stream.blocks, stream.done
        )
        stream.worker, stream.blocks = target, target.allocate(len(stream.tokens))
        self._copy(before, stream, 0)
        self.events["handed over"] += 1

    def _copy(self, source: RandomRequest, target: RandomRequest, first: int) -> None:
        """Copy the KV of ``source`` to the blocks of ``target``, a request with the same tokens:
        from block ``first`` to the last one with a computed token of ``target``."""
        pools = [stream.worker.runner.pool.tensor for stream in (source, target)]
        num_spans = -(-target.done // self.block_tokens)
        for index in range(first, num_spans * target.worker.runner.num_groups):
            pools[1][target.blocks[index]] = pools[0][source.blocks[index]]

    @property
    def is_done(self) -> bool:
        return all(stream.done == len(stream.tokens) for stream in self.streams)

    def step(self) -> None:
        """Run one step with random unfinished requests; each advances by a token or a chunk."""
        for worker in self.workers:
            going = [s for s in self.streams if s.worker is worker and s.done < len(s.tokens)]
            chosen = [stream for stream in going if self.chance.random() < 0.7]
            parts = sorted(((s, self._part(s)) for s in chosen), key=lambda part: len(part[1]) > 1)
            if parts:
                self._run(worker, parts)

    def _part(self, stream: RandomRequest) -> list[int]:
        size = 1 if self.chance.random() < 0.3 else int(self.chance.integers(1, 80))
        return stream.tokens[stream.done : stream.done + size]

    def _run(self, worker: RandomWorker, parts: Sequence[tuple[RandomRequest, list[int]]]) -> None:
        rows = [row_of(tokens, stream.done, stream.blocks) for stream, tokens in parts]
        self.events["steps"] += 1
        self.events["rows"] += len(rows)
        for (stream, tokens), logits in zip(parts, all_logits(worker.runner, rows), strict=True):
            end = stream.done + len(tokens)
            if not torch.equal(logits, stream.wanted[stream.done : end]):
                raise BitsDiffer(
                    f"the logits differ for tokens {stream.done} to {end} of "
                    f"{len(stream.tokens)}, with blocks of {self.block_tokens} tokens, {len(rows)} "
                    f"rows in the step, and {worker.num_threads} threads"
                )
            stream.done = end
            self.events["logits"] += len(tokens)

    def run(self, requests: Sequence[tuple[list[int], torch.Tensor]]) -> None:
        """Run the requests until all their tokens are computed. Raises BitsDiffer."""
        for index in self.chance.permutation(len(requests))[: int(self.chance.integers(1, 5))]:
            self.add(*requests[index])
        self.step()
        self.add_sharing_request()
        while not self.is_done:
            if self.chance.random() < 0.3:
                self.migrate()
            self.step()


def load(
    path: Path,
    dtype: torch.dtype,
    kernels: str,
    *,
    num_blocks: int = 64,
    block_tokens: int = 16,
) -> ModelRunner:
    kind = str(dtype).removeprefix("torch.")
    return ModelRunner.load(
        path,
        RunnerOptions(
            device="cpu",
            dtype=kind,
            cpu_kernels=kernels,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
        ),
    )


def row_of(tokens: Sequence[int], start: int, blocks: Sequence[int]) -> Row:
    return Row(
        RequestId("any"),
        tuple(TokenId(token) for token in tokens),
        start,
        tuple(BlockId(block) for block in blocks),
        sample=False,
        sampling=GREEDY,
    )


def all_logits(runner: ModelRunner, rows: Sequence[Row]) -> list[torch.Tensor]:
    """Run one step that consists of ``rows`` with the runner's model. Return the logits
    [num_tokens, vocab] of each row."""
    host, num_groups = torch.device("cpu"), runner.num_groups
    batch = pack_batch(rows, runner.block_tokens, host, num_groups=num_groups)
    tokens = torch.tensor([token for row in rows for token in row.token_ids])
    with torch.inference_mode():
        hidden = runner._model.hidden(tokens, batch)
        logits = runner._model.logits(hidden, torch.arange(len(tokens)))
    return list(torch.split(logits, [row.num_tokens for row in rows]))


def requests_alone(
    path: Path, dtype: torch.dtype, chance: np.random.Generator, kernels: str, instructions: str
) -> list[tuple[list[int], torch.Tensor]]:
    """Return prompts, each with its logits when computed alone, in one chunk, on one thread."""
    torch.set_num_threads(1)
    with limit_instruction_set(instructions):
        alone = load(path, dtype, kernels)
    prompts: list[list[int]] = [chance.integers(500, size=size).tolist() for size in LENGTHS]
    return [
        (prompt, all_logits(alone, [row_of(prompt, 0, range(20 * alone.num_groups))])[0])
        for prompt in prompts
    ]


@dataclass
class DeterminismCell:
    """The result for one architecture in one number format."""

    architecture: str
    dtype: str
    placements: int = 0
    differing: int = 0
    first: str = ""
    seconds: float = 0.0
    events: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {what}" for what, count in sorted(self.events.items()))
        verdict = "the same bits" if not self.differing else f"{self.differing} differ"
        first = f"; the first: {self.first}" if self.first else ""
        return (
            f"{self.architecture:12} {self.dtype:9} {self.placements:5} placements: {verdict:14} "
            f"({counts}){first}, {self.seconds:.1f} s"
        )


def cell_of(
    name: str, dtype: torch.dtype, count: int, options: argparse.Namespace
) -> DeterminismCell:
    cell = DeterminismCell(name, str(dtype).removeprefix("torch."))
    chance = np.random.default_rng([options.seed, *name.encode(), dtype.itemsize])
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        make_model(path, name, seed=options.seed)
        sets = options.instructions
        requests = requests_alone(path, dtype, chance, options.kernels, sets[0])
        for _ in range(count):
            placement = RandomPlacement(
                path, dtype, chance, kernels=options.kernels, instructions=sets
            )
            cell.placements += 1
            try:
                placement.run(requests)
            except BitsDiffer as difference:
                cell.differing += 1
                cell.first = cell.first or str(difference)
            cell.events += placement.events
    cell.seconds = time.perf_counter() - began
    return cell


def run(options: argparse.Namespace) -> Iterator[DeterminismCell]:
    shares = {name: ARCHITECTURES[name] for name in options.architectures}
    for name, share in shares.items():
        count = options.placements * share / sum(shares.values()) / len(options.dtypes)
        for dtype in options.dtypes:
            yield cell_of(name, getattr(torch, dtype), max(round(count), 1), options)


# -- cost -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """The cost of a matrix product of [rows, ins] with [outs, ins], as median CPU seconds."""

    dtype: str
    rows: int
    ins: int
    outs: int
    ours: float
    torch: float

    def __str__(self) -> str:
        flops = 2 * self.rows * self.ins * self.outs / 1e9
        return (
            f"{self.dtype:9} {self.rows:5} rows × {self.ins} × {self.outs}: ours "
            f"{flops / self.ours:7.1f} GFLOP/s, torch {flops / self.torch:7.1f} "
            f"({self.torch / self.ours:5.2f} × as fast)"
        )


def costs(options: argparse.Namespace) -> Iterator[Cost]:
    """Measure Baton's product and torch's alternately, on one thread. For few rows there are so
    many copies of the weights that they don't fit into any cache."""
    torch.set_num_threads(1)
    team = KernelThreadPool(1)
    for dtype, (ins, outs) in product(options.dtypes, COST_SIZES):
        yield from costs_of(getattr(torch, dtype), ins, outs, team, options.rounds)


def costs_of(
    dtype: torch.dtype, ins: int, outs: int, team: KernelThreadPool, rounds: int
) -> Iterator[Cost]:
    for rows in COST_ROWS:
        copies = 12 if rows <= 32 else 1
        weights = [torch.randn(outs, ins).to(dtype) for _ in range(copies)]
        packed = [PackedMatrix(team, weight) for weight in weights]
        x = torch.randn(rows, ins).to(dtype)
        ours, theirs = [], []
        for _ in range(rounds):
            with torch.inference_mode():
                ours.append(cpu_seconds(lambda: [matrix(x) for matrix in packed]))  # noqa: B023
                theirs.append(
                    cpu_seconds(lambda: [torch.nn.functional.linear(x, w) for w in weights])  # noqa: B023
                )
        name = str(dtype).removeprefix("torch.")
        yield Cost(
            name, rows, ins, outs,
            float(np.median(ours)) / copies, float(np.median(theirs)) / copies,
        )  # fmt: skip


def cpu_seconds(action: object) -> float:
    assert callable(action)
    began = time.process_time()
    action()
    return time.process_time() - began


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--placements", type=int, default=1000, help="in total")
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--kernels", choices=["on", "off"], default="on")
    parser.add_argument(
        "--instructions", nargs="+", choices=[*INSTRUCTION_SETS, EMULATED_AMX],
        default=sets_with_bits_of(best_instruction_set() or "avx2"),
        help="instruction sets of the workers, which must give the same bits",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--cost", action="store_true", help="also measure the cost")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the cost measurement")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    report = {**describe(), **vars(options), "architectures": [*options.architectures]}
    print(report)
    cells, measured = [], []
    for cell in run(options):
        cells.append(cell)
        print(cell, flush=True)
    for cost in costs(options) if options.cost else ():
        measured.append(cost)
        print(cost, flush=True)
    num_differing = sum(cell.differing for cell in cells)
    lines = {"cells": [vars(cell) for cell in cells], "cost": [asdict(c) for c in measured]}
    print(json.dumps({**report, **lines, "differing": num_differing}))
    return 1 if num_differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
