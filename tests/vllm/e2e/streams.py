"""Streams answers in tests that kill workers, and waits until the workers have been restarted."""

import json
from threading import Event

import httpx
import psutil

from benchmarks.machine import pause
from tests.vllm.e2e.vllm_cluster import GREEDY
from tools.local_cluster import LocalCluster

STREAM_TOKENS = 300


def stream(cluster: LocalCluster, tokens: list[int], started: Event) -> list[int]:
    """Stream an answer; return its tokens. Sets ``started`` once more than three tokens have
    arrived."""
    body = {
        "prompt": tokens, "max_tokens": STREAM_TOKENS, "stream": True, "return_token_ids": True,
        **GREEDY,
    }  # fmt: skip
    headers = {"authorization": f"Bearer {cluster.api_key}"} if cluster.api_key else {}
    received: list[int] = []
    with httpx.Client(timeout=300, headers=headers) as client:
        with client.stream("POST", cluster.url + "/v1/completions", json=body) as answer:
            lines = [""]
            for line in answer.iter_lines():
                lines.append(line)
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    received += choice.get("token_ids") or []
                if len(received) > 3:
                    started.set()
    assert "data: [DONE]" in lines
    return received


def wait_until_restarted(cluster: LocalCluster) -> None:
    """Wait until each worker has a running process and is serving. The test's timeout bounds the
    wait."""
    while True:
        workers = [*cluster.processes("prefill"), *cluster.processes("decode")]
        if all(each["state"] == "serving" and psutil.pid_exists(each["pid"]) for each in workers):
            return cluster.wait_until_ready()
        pause(0.1)
