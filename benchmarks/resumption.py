"""Measure how long a client waits for its next token when its router is killed.

    python -m benchmarks.resumption [--tokens 1000] [--rounds 5] [--model smollm2]

A client streams an answer with an Idempotency-Key from one of two routers. After ``--tokens``
tokens, that router is killed, and the client comes back as soon as its connection breaks. Prints
each round, the median, and JSON as the last line."""

import argparse
import json
import os
import signal
import statistics
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import psutil

from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import describe, pause

PATH = "/v1/completions"
TOKENS_AFTER = 50
"""Tokens of an answer after the router's death."""


class Client:
    """One stream, over as many connections as it takes."""

    def __init__(self, cluster: LocalCluster, tokens: int, seed: int) -> None:
        self._url = cluster.url + PATH
        self._body: dict[str, Any] = {
            "prompt": [*range(10, 90)],
            "max_tokens": tokens + TOKENS_AFTER,
            "seed": seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        self._headers = {"Idempotency-Key": str(uuid.uuid4())}
        self.router_pid = 0

    def tokens(self) -> Iterator[int]:
        """Yield the tokens from the last one on that came, until the connection breaks."""
        with httpx.stream(
            "POST", self._url, json=self._body, headers=self._headers, timeout=120
        ) as answer:
            answer.raise_for_status()
            port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
            self.router_pid = next(
                connection.pid or 0
                for connection in psutil.net_connections("tcp")
                if connection.raddr and connection.raddr.port == port
            )
            event_id = ""
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line.startswith("data: {"):
                    self._headers["Last-Event-ID"] = event_id
                    yield from json.loads(line[6:])["choices"][0].get("token_ids") or []


def measure(cluster: LocalCluster, tokens: int, seed: int) -> float:
    """Return the seconds from the death of a client's router to its next token."""
    cluster.wait_until_ready()
    client = Client(cluster, tokens, seed)
    killed_at, num_tokens = 0.0, 0
    while True:
        try:
            for number, _ in enumerate(client.tokens()):
                if killed_at and number == 0 and num_tokens > tokens:
                    return time.monotonic() - killed_at
                num_tokens += 1
                if num_tokens == tokens:
                    os.kill(client.router_pid, signal.SIGKILL)
                    killed_at = time.monotonic()
        except httpx.TransportError:
            num_tokens = max(num_tokens, tokens + 1)
            pause(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    seconds = []
    with local_cluster(options.model, settings={"routers": 2}) as cluster:
        for seed in range(options.rounds):
            seconds.append(measure(cluster, options.tokens, seed))
            print(f"round {seed}: next token after {seconds[-1]:.2f} s")
    print(f"median: {statistics.median(seconds):.2f} s")
    print(json.dumps({**describe(), "tokens": options.tokens, "seconds": seconds}))


if __name__ == "__main__":
    main()
