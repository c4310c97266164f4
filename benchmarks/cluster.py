"""Compare a cluster of one prefill and one decode worker with the engine alone.

    python -m benchmarks.cluster [--model DIR] [--rounds N]

Measures TTFT, KV transfer, start-up and memory. The cluster and the engine take turns in one run,
with prompts that are not cached. Prints a table, and JSON as the last line.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import httpx
import numpy as np

from baton.checkpoints.checkpoint import load_model_config
from baton.clock import SystemClock
from baton.config import DEMO_MODEL
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import SYSTEM_CLOCK, describe

LENGTHS = (512, 4096)
ANSWER_TOKENS = 16


class Alone:
    """Runs the engine of ``baton generate`` in this process."""

    def __init__(self, model: Path) -> None:
        runner = ModelRunner.load(
            model, RunnerOptions(device="cpu", dtype="float32", pool_bytes=512 << 20)
        )
        config = EngineConfig(block_tokens=16, max_model_tokens=8192)
        self._engine = Engine(
            runner,
            config,
            model_digest=runner.model_digest,
            kv_dtype=runner.kv_dtype,
            eos_token_ids=frozenset(),
            clock=SystemClock(),
        )
        self._count = 0

    def times(self, prompt: list[int]) -> tuple[float, float]:
        """Return the seconds to the first and to the second token."""
        self._count += 1
        spec = RequestSpec(
            RequestId(str(self._count)),
            Epoch(1),
            tuple(TokenId(token) for token in prompt),
            len(prompt),
            SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True),
        )
        began, durations = SYSTEM_CLOCK(), []
        self._engine.add(spec, Task.PREFILL_AND_DECODE)
        while self._engine.has_work():
            if self._engine.step().outputs:
                durations.append(SYSTEM_CLOCK() - began)
        return durations[0], durations[1]


def cluster_times(
    client: httpx.Client, prompt: list[int]
) -> tuple[float, float, dict[str, dict[str, str]]]:
    """Send a request over HTTP. Return the seconds until its first and until its second token, and
    what the router's ``/admin/requests`` reports about it, such as the exposed KV transfer."""
    body = {
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    times: list[float] = []
    began = SYSTEM_CLOCK()
    with client.stream("POST", "/v1/completions", json=body) as answer:
        request_id = answer.headers["x-baton-request-id"]
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                tokens = choices[0].get("token_ids") if choices else None
                times.extend([SYSTEM_CLOCK() - began] * len(tokens or []))
    return times[0], times[1], client.get(f"/admin/requests/{request_id}").json()


def time_to_first_token(
    client: httpx.Client, alone: Alone, vocabulary: int, rounds: int
) -> list[dict[str, float]]:
    chance = np.random.default_rng(1)
    rows = []
    for length in LENGTHS:
        ours, theirs, gaps, exposed, seconds, size = [], [], [], [], [], 0
        for number in range(rounds + 1):
            prompts = chance.integers(3, vocabulary, size=(2, length)).tolist()
            reference = alone.times(prompts[0])
            first, second, explanation = cluster_times(client, prompts[1])
            if number:  # the first round warms up
                ours.append(first)
                theirs.append(reference[0])
                gaps.append((second - first) - (reference[1] - reference[0]))
                details = explanation["details"]
                exposed.append(float(details["kv_transfer_exposed_seconds"]) / first)
                seconds.append(float(details["kv_transfer_read_seconds"]))
                size = int(details["kv_transfer_bytes"])
        rows.append(
            {
                "prompt_tokens": length,
                "cluster_ttft_seconds": statistics.median(ours),
                "alone_ttft_seconds": statistics.median(theirs),
                "ratio": statistics.median(ours) / statistics.median(theirs),
                "second_token_delay_seconds": statistics.median(gaps),
                "exposed_share_of_ttft": statistics.median(exposed),
                "kv_transfer_bytes": size,
                "ship_seconds": statistics.median(seconds),
            }
        )
    return rows


def memory_by_role(cluster: LocalCluster) -> dict[str, tuple[float, float]]:
    """Return the resident megabytes of each process of the cluster, by its name in ``baton status``
    (not its PID). The first number is anonymous and file-backed memory, the second is touched
    shared memory, which consists of the store's arena and the KV pools."""
    found = {}
    for entry in cluster.status()["processes"]:
        lines = Path(f"/proc/{entry['pid']}/status").read_text().splitlines()
        parts = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines if "kB" in line}
        own = parts["RssAnon:"] + parts["RssFile:"]
        found[entry["id"]] = (round(own / 1e6, 1), round(parts["RssShmem:"] / 1e6, 1))
    return found


def start_seconds(model: Path | None, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        began = SYSTEM_CLOCK()
        with local_cluster(model):
            times.append(SYSTEM_CLOCK() - began)
    return times


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--transports", default="")
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine)
    starts = start_seconds(options.model, options.starts)
    model = options.model or DEMO_MODEL
    alone = Alone(model)
    settings = {"transports": options.transports} if options.transports else {}
    with local_cluster(options.model, settings=settings) as cluster:
        vocabulary = load_model_config(model).vocab_size
        memory = memory_by_role(cluster)
        with httpx.Client(base_url=cluster.url, timeout=300) as client:
            rows = time_to_first_token(client, alone, vocabulary, options.rounds)
        loaded = memory_by_role(cluster)
    print("prompt   cluster TTFT   alone TTFT   ratio   exposed/TTFT   second token later by")
    for row in rows:
        print(
            f"{row['prompt_tokens']:6} {row['cluster_ttft_seconds'] * 1e3:11.1f} ms "
            f"{row['alone_ttft_seconds'] * 1e3:9.1f} ms {row['ratio']:7.3f} "
            f"{row['exposed_share_of_ttft']:13.1%} "
            f"{row['second_token_delay_seconds'] * 1e3:16.1f} ms"
        )
    print(f"up --detach to ready: {statistics.median(starts):.1f} s (median of {len(starts)})")
    print("resident MB      started: own, shared      after the load: own, shared")
    for name, (own, shared) in memory.items():
        print(
            f"  {name:14} {own:12.1f} {shared:7.1f} {loaded[name][0]:22.1f} {loaded[name][1]:7.1f}"
        )
    print(
        json.dumps(
            {
                "machine": machine,
                "ttft": rows,
                "start_seconds": starts,
                "resident_megabytes": {"started": memory, "loaded": loaded},
                "seed": 1,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
