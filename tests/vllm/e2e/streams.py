"""Streams answers in tests that kill workers, and waits until the workers have been restarted."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import httpx
import psutil

from testkit.local_cluster import LocalCluster
from testkit.machine import pause
from tests.vllm.e2e.vllm_cluster import GREEDY, prompt

STREAM_TOKENS = 600
START_ATTEMPTS = 10


def stream(cluster: LocalCluster, tokens: list[int], started: Event) -> list[int]:
    """Stream an answer; return its tokens. Sets ``started`` once more than three tokens have
    arrived, or the stream has failed."""
    body = {
        "prompt": tokens, "max_tokens": STREAM_TOKENS, "stream": True, "return_token_ids": True,
        **GREEDY,
    }  # fmt: skip
    headers = {"authorization": f"Bearer {cluster.api_key}"} if cluster.api_key else {}
    received: list[int] = []
    lines = [""]
    try:
        # Without verify=False, loading certificates would take longer than an answer.
        with (
            httpx.Client(timeout=300, headers=headers, verify=False) as client,
            client.stream("POST", cluster.url + "/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == 200, answer.read()
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
    finally:
        started.set()
    assert "data: [DONE]" in lines
    return received


def start_streams(
    pool: ThreadPoolExecutor, cluster: LocalCluster, num_streams: int, prompt_tokens: int
) -> tuple[list[list[int]], list[Future[list[int]]]]:
    """Start streams whose prompts have ``prompt_tokens`` tokens and some more; return the prompts
    and the streams, once one stream has tokens and none has ended. On a busy machine, all tokens of
    a stream may arrive at once; then start anew, with prompts that have not been computed yet.
    Raises what a stream raises."""
    for attempt in range(START_ATTEMPTS):
        prompts = [
            prompt(100 + attempt * num_streams + number, prompt_tokens + number)
            for number in range(num_streams)
        ]
        started = Event()
        streams = [pool.submit(stream, cluster, each, started) for each in prompts]
        started.wait()
        if not any(each.done() for each in streams):
            return prompts, streams
        for each in streams:
            each.result()
    raise AssertionError(f"{START_ATTEMPTS} times, all tokens of a stream arrived at once")


def wait_until_restarted(cluster: LocalCluster) -> None:
    """Wait until each worker has a running process and is serving. The test's timeout bounds the
    wait."""
    while True:
        workers = [*cluster.processes("prefill"), *cluster.processes("decode")]
        if all(each["state"] == "serving" and psutil.pid_exists(each["pid"]) for each in workers):
            return cluster.wait_until_ready()
        pause(0.1)
