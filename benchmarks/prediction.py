"""Compare the conductor's predicted TTFT with the measured TTFT, and time exposed KV transfers.

    python -m benchmarks.prediction [--engine vllm] [--loads 64-2048x1,64-2048x4] [--requests 40]

A load is SHORTEST-LONGESTxCONCURRENCY: CONCURRENCY clients send requests, each client its next one
when the previous one has been answered. A prompt is random and has SHORTEST to LONGEST tokens.
Warm-up requests let the workers measure their steps. Prints, for each load, percentiles of the
predicted and the measured TTFT and of the ratio between them, and JSON as the last line. The
measured TTFT ends when the first token reaches the router. Requests without a predicted TTFT are
left out.

The exposed time of a KV transfer is the time by which it delays the request's second token: from
the moment when the decode worker learns of the last chunk, at the end of the prefill, until it has
read all KV. ``exposed_share`` is the median exposed time of the requests whose KV was transferred,
divided by the median measured TTFT of all requests.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.machine import describe
from benchmarks.vllm.model import VOCAB_SIZE, make_model
from benchmarks.vllm.systems import baton_cluster
from tools.local_cluster import VLLM_PYTHON, LocalCluster

SEED = 1
WARM_UP = 12
ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PredictionLoad:
    """``concurrency`` concurrent streams of prompts whose length is uniform in [shortest,
    longest]."""

    shortest: int
    longest: int
    concurrency: int

    @classmethod
    def parse(cls, text: str) -> "PredictionLoad":
        lengths, _, concurrency = text.partition("x")
        shortest, _, longest = lengths.partition("-")
        return cls(int(shortest), int(longest), int(concurrency))

    def __str__(self) -> str:
        return f"{self.shortest}-{self.longest}x{self.concurrency}"


@dataclass(frozen=True, slots=True)
class PredictionRow:
    """The result of a load, over ``num_predicted`` requests; times are in milliseconds.
    ``p50_error`` is the relative error of the median predicted TTFT. ``ratio_p10`` to ``ratio_p90``
    are percentiles of a request's predicted TTFT divided by its measured TTFT."""

    load: str
    num_predicted: int
    predicted_p50: float
    measured_p50: float
    p50_error: float
    ratio_p10: float
    ratio_p50: float
    ratio_p90: float
    exposed_share: float


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """The TTFT of a request, predicted and measured, and the exposed time of its KV transfer; in
    seconds. ``predicted`` is None if the worker had not measured enough steps. ``exposed`` is None
    if one worker did everything."""

    predicted: float | None
    measured: float
    exposed: float | None


def send_request(cluster: LocalCluster, prompt: Sequence[int]) -> MeasuredRequest:
    body = {
        "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    _, headers = cluster.post_with_headers("/v1/completions", body)
    explained = cluster.get(f"/admin/requests/{headers['x-baton-request-id']}")
    exposed = explained["details"].get("kv_transfer_exposed_seconds")
    return MeasuredRequest(
        explained["predicted"]["ttft_seconds"],
        explained["actual"]["ttft_seconds"],
        None if exposed is None else float(exposed),
    )


def send_requests(
    cluster: LocalCluster, load: PredictionLoad, num_requests: int, chance: np.random.Generator
) -> list[MeasuredRequest]:
    """Send the load's requests; return those whose TTFT was predicted."""
    prompts = [
        chance.integers(10, VOCAB_SIZE, chance.integers(load.shortest, load.longest + 1)).tolist()
        for _ in range(num_requests)
    ]
    with ThreadPoolExecutor(load.concurrency) as pool:
        requests = list(pool.map(lambda prompt: send_request(cluster, prompt), prompts))
    return [request for request in requests if request.predicted is not None]


def summarize(load: PredictionLoad, requests: Sequence[MeasuredRequest]) -> PredictionRow:
    predicted = np.array([1e3 * (request.predicted or 0.0) for request in requests])
    measured = np.array([1e3 * request.measured for request in requests])
    transfers = [request.exposed for request in requests if request.exposed is not None]
    exposed = 1e3 * float(np.median(transfers or [0.0]))
    p10, p50, p90 = (
        round(float(ratio), 2) for ratio in np.percentile(predicted / measured, [10, 50, 90])
    )
    p50s = float(np.median(predicted)), float(np.median(measured))
    return PredictionRow(
        str(load),
        len(requests),
        round(p50s[0], 1),
        round(p50s[1], 1),
        round(p50s[0] / p50s[1] - 1, 3),
        p10,
        p50,
        p90,
        round(exposed / p50s[1], 4),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=["baton", "vllm"], default="baton")
    parser.add_argument("--loads", default="64-2048x1,64-2048x4")
    parser.add_argument("--requests", type=int, default=40)
    options = parser.parse_args()
    machine = describe()
    print(machine, f"engine {options.engine}, seed {SEED}")
    rows = []
    chance = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model, SEED)
        python = VLLM_PYTHON if options.engine == "vllm" else None
        with baton_cluster(model, python) as cluster:
            send_requests(cluster, PredictionLoad(64, 2048, 1), WARM_UP, chance)
            for load in map(PredictionLoad.parse, options.loads.split(",")):
                sent = send_requests(cluster, load, options.requests, chance)
                rows.append(summarize(load, sent))
                print(rows[-1])
    print(json.dumps({"machine": machine, **vars(options), "rows": [asdict(r) for r in rows]}))


if __name__ == "__main__":
    main()
