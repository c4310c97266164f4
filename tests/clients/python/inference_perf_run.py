"""Runs inference-perf with a Prometheus that scrapes the cluster, and compares its two reports, its
own and the one from Prometheus, with Baton's counts."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cases import MODEL, MODEL_PATH, URL, run
from load_counts import counts_since, read_counts

PROGRAM = Path(sys.executable).parent / "inference-perf"
START_SECONDS = 60.0
# inference-perf asks for what grew in a whole number of seconds, which may begin 0.5 s after it
# does, and its load 1 s after it: at least one scrape must lie between the two.
SCRAPE_INTERVAL = "200ms"


@contextmanager
def prometheus(folder: Path) -> Iterator[str]:
    """Run a Prometheus that scrapes all of the cluster's processes; yield its URL once it has
    scraped each of them."""
    targets = os.environ["OPS_ADDRESSES"].split(",")
    scrapes = [{"job_name": "baton", "static_configs": [{"targets": targets}]}]
    config = folder / "prometheus.json"  # JSON is YAML
    settings = {"global": {"scrape_interval": SCRAPE_INTERVAL}, "scrape_configs": scrapes}
    config.write_text(json.dumps(settings))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    command = [
        *(shutil.which("prometheus") or "prometheus", f"--config.file={config}"),
        *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for_scrapes(address, len(targets))
            yield f"http://{address}"
        finally:
            process.terminate()


def _wait_for_scrapes(address: str, num_targets: int) -> None:
    give_up_at = time.monotonic() + START_SECONDS
    query = f"http://{address}/api/v1/query?query=count(count_over_time(up[1m])>1)"
    while time.monotonic() < give_up_at:
        try:
            with urllib.request.urlopen(query, timeout=5) as answer:
                result = json.load(answer)["data"]["result"]
            if result and int(result[0]["value"][1]) == num_targets:
                return
        except OSError:
            pass
        time.sleep(0.2)  # noqa: TID251
    raise TimeoutError("Prometheus has not scraped all processes")


def completions() -> Any:
    """Return the number of requests, and each figure of inference-perf that is not Baton's: counts
    from its own report; from Prometheus, whose counts are extrapolated, tokens per request and mean
    times."""
    before = read_counts()
    with tempfile.TemporaryDirectory() as name, prometheus(Path(name)) as url:
        folder = Path(name)
        config = {
            "api": {"type": "completion", "streaming": True},
            "data": {
                "type": "shared_prefix",
                "shared_prefix": {
                    "num_groups": 1,
                    "num_prompts_per_group": 8,
                    "system_prompt_len": 70,
                    "question_len": 20,
                    "output_len": 16,
                    "seed": 7,
                },
            },
            "load": {
                "type": "concurrent",
                "num_workers": 1,
                "stages": [{"num_requests": 8, "concurrency_level": 2}],
            },
            "server": {"type": "vllm", "model_name": MODEL, "base_url": URL, "ignore_eos": True},
            "tokenizer": {"pretrained_model_name_or_path": MODEL_PATH},
            "metrics": {
                "type": "prometheus",
                "prometheus": {"url": url, "scrape_interval": 1},
            },
            "storage": {"local_storage": {"path": str(folder / "reports")}},
        }
        path = folder / "config.json"
        path.write_text(json.dumps(config))
        subprocess.run(
            [str(PROGRAM), "-c", str(path)], check=True, capture_output=True, timeout=200
        )
        own = json.loads((folder / "reports" / "summary_lifecycle_metrics.json").read_text())
        read = json.loads((folder / "reports" / "summary_prometheus_metrics.json").read_text())
    counts = counts_since(before)
    requests, found = counts["requests"], read["successes"]
    rate = found["rate"]
    pairs = {
        "requests": (own["successes"]["count"], requests),
        "prompt_tokens": (found["prompt_len"]["rate"] / rate, counts["prompt_tokens"] / requests),
        "completion_tokens": (
            found["output_len"]["rate"] / rate,
            counts["completion_tokens"] / requests,
        ),
        "cached_share": (
            found["prefix_cache_hit_percent"]["mean"] / 100,
            counts["cached_tokens"] / counts["prompt_tokens"],
        ),
        "request_seconds": (
            found["request_latency"]["mean"],
            counts["request_seconds"] / requests,
        ),
        "first_token_seconds": (
            found["time_to_first_token"]["mean"],
            counts["first_token_seconds"] / requests,
        ),
    }
    # inference-perf rounds what it reads from Prometheus to six decimal places.
    different = {
        name: pair
        for name, pair in pairs.items()
        if abs(pair[0] - pair[1]) > 1e-4 * max(1.0, abs(pair[1]))
    }
    return [requests, different]


run({"completions": completions})
