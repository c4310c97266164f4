"""Cancels half of the requests at random moments, and tells which blocks are in use afterwards."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from testkit.local_cluster import LocalCluster

ANSWER_TOKENS = 40
MAX_PROMPT_TOKENS = 700
AT_ONCE = 10
IDLE_CHECKS = 50


@dataclass(frozen=True)
class CancellationStorm:
    """Requests, half of which are cancelled. Request i is cancelled after ``cancel_after[i]``
    tokens (0 means before the first one), or not at all if that is None."""

    prompts: Sequence[list[int]]
    cancel_after: Sequence[int | None]

    @classmethod
    def make(cls, count: int, seed: int) -> "CancellationStorm":
        chance = np.random.default_rng(seed)
        lengths = chance.integers(1, MAX_PROMPT_TOKENS, size=count)
        prompts = [chance.integers(3, 4000, size=length).tolist() for length in lengths]
        leaving = set(chance.permutation(count)[: count // 2].tolist())
        moments = chance.integers(ANSWER_TOKENS, size=count).tolist()
        return cls(prompts, [moments[n] if n in leaving else None for n in range(count)])

    def run(self, url: str, key: str = "") -> list[int | None]:
        """Send all requests, with the API key if given. Return the number of tokens of each
        request's answer, or None if the request was cancelled."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda n: self._one(url, n, key), range(len(self.prompts))))

    def _one(self, url: str, number: int, key: str) -> int | None:
        body = {
            "prompt": self.prompts[number],
            "max_tokens": ANSWER_TOKENS,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {"authorization": f"Bearer {key}"} if key else {}
        stop, count = self.cancel_after[number], 0
        with (
            httpx.Client(timeout=120, headers=headers) as client,
            client.stream("POST", url + "/v1/completions", json=body) as answer,
        ):
            if stop == 0:
                return None
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:])["choices"]
                    count += len(choices[0].get("token_ids") or []) if choices else 0
                if stop is not None and count >= stop:
                    return None
        return count


def idle_workers(cluster: LocalCluster) -> list[dict[str, Any]]:
    """Wait, for a limited time, until every worker answers and has no referenced block; return the
    workers' entries of ``baton check --json``."""
    for _ in range(IDLE_CHECKS):
        workers = json.loads(cluster.baton("check", "--json", check=False).stdout)["workers"]
        if not any(w["error"] or w["referenced_blocks"] or w["filling_blocks"] for w in workers):
            break
    found: list[dict[str, Any]] = workers
    return found


def are_blocks_free(worker: dict[str, Any]) -> bool:
    """Whether all blocks of a worker are free or idle. Idle blocks hold evictable prefix cache, so
    they are available to any request."""
    if worker["error"]:
        return False
    free = worker["free_blocks"] + worker["idle_blocks"]
    return free == worker["num_blocks"] and not worker["violation"]
