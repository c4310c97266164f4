"""Check with several models that every way to reuse KV gives the tokens of a cold run, in FP32.

    python -m benchmarks.reuse_exactness

Reuses KV from the worker's own pool, from the store's DRAM over shared memory, from its SSD after a
restart of the store node, from a store on another host over NIXL and gRPC, by fetching blocks from
the end of the prompt while computing from its start, and from the blocks of an earlier answer.
Prints a table. Exits with 1 if tokens differ, or if one of these ways reused nothing.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from baton.config import DEMO_MODEL
from baton.core.ids import RequestId, TokenId
from baton.core.request import RequestSpec
from benchmarks.kvstore import node
from benchmarks.reuse import ReuseBench, ReuseWorker
from prefill_worker.reload_policy import ReloadMode
from testkit.model_zoo import ZOO, make_model

NUM_TOKENS = 400
CHUNK = 48
ANSWER = 24
WAYS = ("device", "dram", "ssd", "peer nixl", "peer grpc", "split", "answer")


def longer(spec: RequestSpec, tokens: Sequence[int], name: str) -> RequestSpec:
    """Return the request of a second turn: its prompt is that of ``spec``, the answer ``tokens``,
    and 40 more tokens."""
    ids = (*spec.token_ids, *[TokenId(token) for token in tokens], *spec.token_ids[:40])
    return replace(spec, request_id=RequestId(name), token_ids=ids, num_prompt_tokens=len(ids))


def reused(worker: ReuseWorker, tier: str) -> int:
    """Return the number of tokens whose KV came from ``tier``."""
    details = worker.prefix_fetch.stats.details(worker.cached)
    return int(details[f"cached_{tier}"])


async def compare(bench: ReuseBench) -> list[tuple[str, int, int, int]]:
    """For each way to reuse KV, return its name, the number of answer tokens that equal those of a
    cold run, the number of all answer tokens, and the number of prompt tokens whose KV was
    reused."""
    sampling = replace(bench.spec(1, 1.0).sampling, max_tokens=ANSWER)
    spec = replace(bench.spec(1, 1.0), sampling=sampling)
    async with bench.worker("", "", "shm") as cold:
        wanted = list(await cold.answer(spec))
    second = longer(spec, wanted, "second")
    async with bench.worker("", "", "shm") as cold:
        wanted_second = list(await cold.answer(second))
    rows: list[tuple[str, int, int, int]] = []

    def note(source: str, got: Sequence[int], expected: Sequence[int], count: int) -> None:
        equal = sum(a == b for a, b in zip(got, expected, strict=True))
        rows.append((source, equal, len(expected), count))

    with tempfile.TemporaryDirectory() as folder:
        with node(1 << 28, folder, 256 << 20) as (address, socket_path):
            async with bench.worker(address, socket_path, "shm") as worker:
                await worker.answer(spec)
                await worker.stored([*spec.token_ids, *wanted[:-1]])  # type: ignore[list-item]
                again = replace(spec, request_id=RequestId("again"))
                note("device", await worker.answer(again), wanted, reused(worker, "device"))
            for source, over in (("dram", "shm"), ("peer nixl", "nixl"), ("peer grpc", "grpc")):
                async with bench.worker(address, socket_path, over, ReloadMode.FETCH) as worker:
                    note(source, await worker.answer(spec), wanted, reused(worker, "dram"))
            async with bench.worker(address, socket_path, "shm", ReloadMode.SPLIT) as worker:
                got = await worker.answer(spec)
                count = reused(worker, "dram")
                assert count < len(spec.token_ids) - CHUNK, "no part of the prompt was computed"
                note("split", got, wanted, count)
            async with bench.worker(address, socket_path, "shm", ReloadMode.FETCH) as worker:
                got = await worker.answer(second)
                count = worker.cached - len(spec.token_ids)
                note("answer", got, wanted_second, max(count, 0))
        with node(1 << 28, folder, 256 << 20) as (address, socket_path):
            async with bench.worker(address, socket_path, "shm", ReloadMode.FETCH) as worker:
                note("ssd", await worker.answer(spec), wanted, reused(worker, "disk"))
    return rows


async def run(names: Sequence[str]) -> int:
    bad = total = 0
    print(f"{'model':14}" + "".join(f"{source:>22}" for source in WAYS))
    with tempfile.TemporaryDirectory() as folder:
        for name in ("demo", *names):
            model = DEMO_MODEL
            if name != "demo":
                model = Path(folder) / name
                make_model(model, name)
            bench = ReuseBench(NUM_TOKENS, model, CHUNK)
            rows = {row[0]: row for row in await compare(bench)}
            cells = []
            for source in WAYS:
                _, equal, count, num_reused = rows[source]
                bad += equal != count or num_reused == 0
                total += count
                cells.append(f"{equal} of {count} ({num_reused} reused)")
            print(f"{name:14}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
            for transport in bench.transports.values():
                transport.close()
    print(f"{total} tokens; {bad} ways to reuse KV gave different tokens or reused nothing")
    return int(bad > 0)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    models_help = "models of the zoo; empty: the demo model only"
    parser.add_argument("--models", default=",".join(ZOO), help=models_help)
    options = parser.parse_args(arguments)
    names = [name for name in options.models.split(",") if name]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
