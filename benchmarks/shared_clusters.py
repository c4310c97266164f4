"""Measure the TTFT of clusters that share the machine's cores with each other and with other
programs.

    python -m benchmarks.shared_clusters [--shape 50m|0.6b] [--layers N] [--dtype bfloat16|float32]
                                         [--burners N] [--tokens N …] [--seconds S] [--rounds N]
                                         [--beside DIR] [--vllm PYTHON]

The situations are those of ``benchmarks.shared_cores``, but with clusters of one prefill and one
decode worker instead of engines, with default ``threads``. Each cluster gets one request at a time,
over HTTP. The fair time counts the threads of one worker per cluster, since the prefill worker and
the decode worker of one request take turns. ``--vllm`` is an interpreter that has vLLM: in place of
each cluster, one vLLM server with a thread per core is measured, too. Prints a table, and JSON as
the last line.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from pathlib import Path

import numpy as np

from benchmarks.engine import SHAPES, shape_of
from benchmarks.machine import SYSTEM_CLOCK, describe
from benchmarks.shared_cores import HERE, Samples, Situation, burning, report_lines, situations
from benchmarks.token_gaps import write_servable_model
from benchmarks.ttft_client import time_request
from benchmarks.vllm.systems import VllmServer, vllm_server
from tools.local_cluster import LocalCluster, local_cluster

ANSWER_TOKENS = 16

Server = LocalCluster | VllmServer


async def times_of(
    servers: list[Server],
    tokens: int,
    seconds: float,
    chance: np.random.Generator,
    vocabulary: int,
) -> list[float]:
    """Send prompts to all servers for ``seconds``, one at a time to each; return their TTFTs."""
    end = SYSTEM_CLOCK() + seconds

    async def use(server: Server) -> list[float]:
        times: list[float] = []
        while not times or SYSTEM_CLOCK() < end:
            prompt = chance.integers(1, vocabulary, tokens).tolist()
            request = await time_request(server.url, "", prompt, ANSWER_TOKENS)
            if request.ttft_seconds is None:
                raise SystemExit(f"{server.url} returned status {request.status}")
            times.append(request.ttft_seconds)
        return times

    return list(chain.from_iterable(await asyncio.gather(*map(use, servers))))


def measure(model: Path, options: argparse.Namespace) -> Samples:
    """Return all TTFTs by version, situation and number of tokens. Servers of one version run at a
    time, since idle ones cost some CPU time, too."""
    chance, vocabulary = np.random.default_rng(options.seed), shape_of(options)[-1]
    samples: Samples = defaultdict(list)
    settings: dict[str, object] = {
        "dtype": options.dtype,
        **dict(each.split("=") for each in options.set),
    }

    def cluster_of(tree: Path) -> Callable[[], AbstractContextManager[Server]]:
        return lambda: local_cluster(model, settings=settings, tree=tree)

    versions = {"this": cluster_of(HERE)}
    if options.beside:
        versions["other"] = cluster_of(options.beside)
    if options.vllm:
        versions["vllm"] = lambda: vllm_server(model, options.vllm, options.threads)

    def run(version: str, situation: Situation, servers: list[Server]) -> None:
        print(f"{version}: {situation.name}", flush=True)
        with burning(situation.burners):
            for tokens in options.tokens:
                samples[version, situation.name, f"{tokens:,} tokens"] += asyncio.run(
                    times_of(
                        servers[: situation.engines], tokens, options.seconds, chance, vocabulary
                    )
                )

    for _ in range(options.rounds):
        for version, start in versions.items():
            with ExitStack() as stack:
                servers = [stack.enter_context(start()) for _ in range(2)]
                asyncio.run(times_of(servers, min(options.tokens), 0, chance, vocabulary))
                for situation in situations(options.burners):
                    run(version, situation, servers)
    return samples


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="50m")
    parser.add_argument(
        "--layers", type=int, default=0, help="layers of the model; fewer take less time, 0: all"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="that a worker has by default")
    parser.add_argument("--burners", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each length in a round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--beside", type=Path, help="a checkout of another version")
    parser.add_argument("--vllm", type=Path, help="an interpreter that has vLLM for CPUs")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    options.cases = [f"{tokens:,} tokens" for tokens in options.tokens]
    report = {
        **describe(),
        **vars(options),
        "beside": str(options.beside or ""),
        "vllm": str(options.vllm or ""),
    }
    print(report)
    with tempfile.TemporaryDirectory() as folder:
        write_servable_model(Path(folder), options)
        samples = measure(Path(folder), options)
    print(json.dumps({**report, "lines": report_lines(samples, options)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
