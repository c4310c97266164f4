"""Measure prefill and decode times of a running cluster, for ``baton simulate --costs``.

    python -m tools.cost_table --url http://127.0.0.1:8000 > costs.json

Measures the prefill of uncached and of mostly cached prompts, then the decoding of one or several
concurrent answers. The cluster should have no other load. Times are measured at the client and
include HTTP.
"""

import argparse
import asyncio
import json
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from baton.clock import SystemClock

NEW_TOKENS = (32, 128, 512, 1024, 2048)
CACHED = ((64, 960), (64, 1984), (512, 1536))
"""Prompts with a cached prefix: (new tokens, cached tokens)."""

BATCHES = (1, 2, 4)
CONTEXTS = (128, 1024)
ANSWER_TOKENS = 160
"""The length of an answer. Tokens may arrive in groups, so the ITL of a short answer would be
imprecise."""

MOST_TRIES = 20
"""The maximum number of attempts per batch. An attempt fails if all later tokens of an answer
arrive at once, as on a busy machine."""

REQUEST_SECONDS = 300.0
CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Timed:
    """The arrival time of each token of an answer, in seconds since the request was sent."""

    request_id: str
    at_seconds: tuple[float, ...]

    @property
    def gap_seconds(self) -> float:
        """The mean inter-token latency, without the first quarter of the tokens. After that
        quarter, the KV transfer is over and all answers are in one batch. 0 means that the
        remaining tokens arrived at once."""
        later = self.at_seconds[len(self.at_seconds) // 4 :]
        return (later[-1] - later[0]) / (len(later) - 1)


async def timed(client: httpx.AsyncClient, prompt: list[int], answer_tokens: int) -> Timed:
    body = {
        "prompt": prompt,
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    seconds: list[float] = []
    began = CLOCK.monotonic()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        request_id = answer.headers["x-baton-request-id"]
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                tokens = (choices[0].get("token_ids") if choices else None) or []
                seconds += [CLOCK.monotonic() - began] * len(tokens)
    return Timed(request_id, tuple(seconds))


class RandomPrompts:
    """Makes prompts of random token ids, so that no two prompts share a block."""

    def __init__(self, seed: int, most_id: int = 256) -> None:
        self._generator = np.random.default_rng(seed)
        self._most_id = most_id

    def fresh(self, num_tokens: int) -> list[int]:
        ids: list[int] = self._generator.integers(3, self._most_id, size=num_tokens).tolist()
        return ids


async def request_details(client: httpx.AsyncClient, answer: Timed) -> dict[str, Any]:
    """Return the details of the answer's request from the router's admin API."""
    details: dict[str, Any] = (await client.get(f"/admin/requests/{answer.request_id}")).json()
    return details


async def prefill_rows(
    client: httpx.AsyncClient, prompts: RandomPrompts, rounds: int
) -> list[dict[str, Any]]:
    """Measure the prefill of each kind of prompt. The number of cached tokens is the one that the
    router reports."""
    rows = []
    for new, cached in [*((new, 0) for new in NEW_TOKENS), *CACHED]:
        for number in range(rounds + 1):
            head = prompts.fresh(cached)
            if cached:
                await timed(client, [*head, *prompts.fresh(1)], 1)
            answer = await timed(client, [*head, *prompts.fresh(new)], 2)
            found = int((await request_details(client, answer))["cached_tokens"])
            if number:  # the first round is a warm-up
                rows.append(
                    {
                        "new_tokens": new + cached - found,
                        "cached_tokens": found,
                        "seconds": answer.at_seconds[0],
                    }
                )
    return rows


async def decode_rows(
    client: httpx.AsyncClient, prompts: RandomPrompts, rounds: int, num_decode: int
) -> list[dict[str, Any]]:
    """Measure decoding with each number of concurrent answers per worker. Raises RuntimeError when
    the machine is too busy."""
    rows = []
    for context in CONTEXTS:
        for batch in BATCHES:
            for _ in range(rounds):
                answers = await _batch(client, prompts, context, batch * num_decode)
                gaps: dict[str, list[float]] = {}
                for answer in answers:
                    worker = (await request_details(client, answer))["decode"]["id"]
                    gaps.setdefault(worker, []).append(answer.gap_seconds)
                held = context + ANSWER_TOKENS * 5 // 8
                rows += [
                    {
                        "batch": len(of_worker),
                        "context_tokens": len(of_worker) * held,
                        "seconds": statistics.median(of_worker),
                    }
                    for of_worker in gaps.values()
                ]
    return rows


async def _batch(
    client: httpx.AsyncClient, prompts: RandomPrompts, context: int, count: int
) -> list[Timed]:
    """Send ``count`` requests at once, and return their answers. Repeat this if the tokens after
    the first quarter of an answer have arrived all at once, since its decode time is then
    unknown."""
    for _ in range(MOST_TRIES):
        answers = await asyncio.gather(
            *(timed(client, prompts.fresh(context), ANSWER_TOKENS) for _ in range(count))
        )
        if all(answer.gap_seconds > 0 for answer in answers):
            return answers
    raise RuntimeError(
        f"in each of {MOST_TRIES} attempts, the tokens of one of {count} answers arrived at once; "
        "the machine is too busy to measure the inter-token latency"
    )


async def table(
    url: str, kv_bytes_per_token: int, capacity_tokens: int, rounds: int, num_decode: int
) -> dict[str, Any]:
    prompts = RandomPrompts(seed=1)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS) as client:
        return {
            "prefill": await prefill_rows(client, prompts, rounds),
            "decode": await decode_rows(client, prompts, rounds, num_decode),
            "kv_bytes_per_token": kv_bytes_per_token,
            "kv_capacity_tokens": capacity_tokens,
        }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode", type=int, default=1, help="decode workers of the cluster")
    parser.add_argument("--kv-bytes-per-token", type=int, default=6144)
    parser.add_argument("--capacity-tokens", type=int, default=87_000)
    options = parser.parse_args(arguments)
    found = asyncio.run(
        table(
            options.url,
            options.kv_bytes_per_token,
            options.capacity_tokens,
            options.rounds,
            options.decode,
        )
    )
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
