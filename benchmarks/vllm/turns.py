"""Measure conversations of two turns on two vLLM servers: placed by Baton with and without the
servers' KV events, and round robin without Baton.

    python -m benchmarks.vllm.turns [--python .venv-vllm/bin/python] [--rounds 2]
        [--conversations 24] [--concurrency 4] [--prompt-tokens 1024] [--shape 50m]

A conversation is a prompt, an answer, and a second prompt of both and 64 tokens more. Second turns
are sent in random order once all first turns have ended, so that round robin finds the server of
the first turn by chance only. All ways use the same two servers, with conversations of their own in
each round. Prints, for second turns, the median and the 99th percentile of the time to first token,
the share of the prompts' tokens that the servers had cached, and JSON as the last line.
"""

import argparse
import asyncio
import itertools
import json
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.vllm.model import SHAPES, VOCAB_SIZE, make_model
from benchmarks.vllm.systems import vllm_server
from testkit.local_cluster import VLLM_START_SECONDS, local_cluster
from testkit.machine import SYSTEM_CLOCK, describe

SEED = 1
SETTINGS: dict[str, object] = {"admission": "off", "slo_itl_seconds": 1, "slo_ttft_seconds": 30}
"""Nothing is refused or sent elsewhere for an objective that two busy cores can't meet."""

ANSWER_TOKENS = 32
MORE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation. Times are in seconds."""

    answer: list[int]
    ttft: float
    prompt_tokens: int
    cached_tokens: int


async def ask(client: httpx.AsyncClient, url: str, model: str, prompt: Sequence[int]) -> Turn:
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    began, first = SYSTEM_CLOCK(), 0.0
    answer: list[int] = []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for event in _events(response):
            for choice in event["choices"]:
                first = first or SYSTEM_CLOCK() - began
                answer += choice.get("token_ids") or []
            usage = event.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Turn(answer, first, len(prompt), cached)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


async def second_turns(
    urls: Sequence[str], model: str, rng: np.random.Generator, options: argparse.Namespace
) -> list[Turn]:
    """Hold conversations, each request at the next of ``urls``; return their second turns."""
    targets = itertools.cycle(urls)
    prompts = [
        rng.integers(10, VOCAB_SIZE, options.prompt_tokens).tolist()
        for _ in range(options.conversations)
    ]
    async with httpx.AsyncClient(timeout=600, verify=False) as client:

        async def ask_all(asked: Sequence[list[int]]) -> list[Turn]:
            limit = asyncio.Semaphore(options.concurrency)

            async def one(prompt: list[int]) -> Turn:
                async with limit:
                    return await ask(client, next(targets), model, prompt)

            return list(await asyncio.gather(*map(one, asked)))

        first = await ask_all(prompts)
        longer = [
            [*prompt, *turn.answer, *rng.integers(10, VOCAB_SIZE, MORE_TOKENS).tolist()]
            for prompt, turn in zip(prompts, first, strict=True)
        ]
        rng.shuffle(longer)
        return await ask_all(longer)


@contextmanager
def open_ways(model: Path, python: Path, folder: Path) -> Iterator[dict[str, list[str]]]:
    """Start two servers, and two clusters in front of them. Yield the addresses of each way."""
    with ExitStack() as stack:
        servers, attached = [], []
        for number in range(2):
            events, replay = (f"ipc://{folder}/{number}.{name}" for name in ("events", "replay"))
            config = {
                "enable_kv_cache_events": True, "publisher": "zmq",
                "endpoint": events, "replay_endpoint": replay,
            }  # fmt: skip
            arguments = (f"--kv-events-config={json.dumps(config)}",)
            server = stack.enter_context(
                vllm_server(model, python, 1, more=(*arguments, "--enable-prompt-tokens-details"))
            )
            servers.append(server.url)
            attached.append(f"mixed={server.url}?kv_events={events}&kv_replay={replay}")
        ways = {"round robin": servers}
        for name, urls in (
            ("Baton, KV events", attached),
            ("Baton, no events", [f"mixed={each}" for each in servers]),
        ):
            cluster = stack.enter_context(
                local_cluster(
                    model, 0, 0, {"attach": ",".join(urls), **SETTINGS}, mixed=2,
                    timeout_seconds=VLLM_START_SECONDS,
                )
            )  # fmt: skip
            ways[name] = [cluster.url]
        yield ways


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--python", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--shape", choices=SHAPES, default="50m")
    options = parser.parse_args()
    machine = describe()
    print(f"{machine}, seed {SEED}")
    found: dict[str, list[Turn]] = defaultdict(list)
    rng = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        make_model(model, SEED, options.shape)
        with open_ways(model, options.python.absolute(), Path(name)) as ways:
            for _ in range(options.rounds):
                for way, urls in ways.items():
                    found[way] += asyncio.run(second_turns(urls, model.name, rng, options))
                    print(f"{way}: {len(found[way])} second turns", flush=True)
    rows = {way: summarize(turns) for way, turns in found.items()}
    for way, row in rows.items():
        print(
            f"{way:18} TTFT p50 {row['ttft_p50_ms']:.0f} ms, p99 {row['ttft_p99_ms']:.0f} ms; "
            f"cached {row['cached']:.1%}"
        )
    print(json.dumps({**machine, "rows": rows}))


def summarize(turns: Sequence[Turn]) -> dict[str, float]:
    p50, p99 = (1e3 * float(np.percentile([t.ttft for t in turns], q)) for q in (50, 99))
    cached = sum(t.cached_tokens for t in turns) / sum(t.prompt_tokens for t in turns)
    return {"ttft_p50_ms": p50, "ttft_p99_ms": p99, "cached": cached}


if __name__ == "__main__":
    main()
