"""Runs aiperf over each API, and compares its counts with Baton's."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cases import MODEL, MODEL_PATH, URL, run
from load_counts import counts_since, read_counts

AIPERF = Path(sys.executable).parent / "aiperf"
PROMPTS = ("--synthetic-input-tokens-mean", "64", "--synthetic-input-tokens-stddev", "0")
SYNTHETIC = (*PROMPTS, "--output-tokens-mean", "8")
TRACE = [
    {"timestamp": 0, "input_length": 40, "output_length": 8, "hash_ids": [1]},
    {"timestamp": 50, "input_length": 40, "output_length": 8, "hash_ids": [1]},
    {"timestamp": 100, "input_length": 60, "output_length": 8, "hash_ids": [2]},
]

THEIRS: dict[str, Callable[[Any], float]] = {
    "requests": lambda report: report["request_count"]["avg"],
    "first_tokens": lambda report: report["time_to_first_token"]["count"],
    "prompt_tokens": lambda report: report["input_sequence_length"]["sum"],
    "completion_tokens": lambda report: report["output_sequence_length"]["sum"],
    "cached_tokens": lambda report: report["total_usage_prompt_cache_read_tokens"]["avg"],
}


def profile(*arguments: str) -> Any:
    """Return how many requests and answers Baton has counted, and each count that differs."""
    before = read_counts()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(AIPERF), "profile", "-m", MODEL, "-u", URL, "--tokenizer", MODEL_PATH),
            *("--streaming", "--use-server-token-count", "--output-artifact-dir", folder),
            *("--ui", "none", "--no-server-metrics", "--no-gpu-telemetry", *arguments),
        ]
        # Offline, aiperf accepts no folder as a tokenizer. With a folder, it asks no hub anyway.
        environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
        subprocess.run(command, check=True, capture_output=True, timeout=200, env=environment)
        report = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
    counts = counts_since(before)
    different = {
        name: [theirs(report), counts[name]]
        for name, theirs in THEIRS.items()
        if theirs(report) != counts[name]
    }
    client_seconds = report["time_to_first_token"]["sum"] / 1000
    if not client_seconds >= counts["first_token_seconds"] > 0:
        different["first_token_seconds"] = [client_seconds, counts["first_token_seconds"]]
    return [counts["requests"], counts["answers"], different]


def replay_trace() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_text("".join(json.dumps(request) + "\n" for request in TRACE))
        return profile(
            *("--endpoint-type", "chat", "--input-file", str(path)),
            *("--custom-dataset-type", "mooncake_trace", "--fixed-schedule"),
        )


run(
    {
        "chat with n=2": lambda: profile(
            *("--endpoint-type", "chat", "--request-count", "4", "--concurrency", "2"),
            *("--extra-inputs", '{"n": 2, "ignore_eos": true}', *SYNTHETIC),
        ),
        "multi-turn chat": lambda: profile(
            *("--endpoint-type", "chat", "--conversation-num", "2", "--concurrency", "1"),
            *("--conversation-turn-mean", "2", "--conversation-turn-stddev", "0", *SYNTHETIC),
        ),
        "trace": replay_trace,
        "completions": lambda: profile(
            *("--endpoint-type", "completions", "--request-count", "4", "--concurrency", "2"),
            *SYNTHETIC,
        ),
        # aiperf reads the usage of complete responses only, not of those cut off by a limit.
        "responses": lambda: profile(
            *("--endpoint-type", "responses", "--request-count", "3", "--concurrency", "1"),
            *(*PROMPTS, "--output-tokens-mean", "200"),
        ),
        "messages": lambda: profile(
            *("--endpoint-type", "messages", "--request-count", "3", "--concurrency", "1"),
            *SYNTHETIC,
        ),
    }
)
