"""Compare the router's CPU time per request between the APIs that it speaks.

    python -m benchmarks.apis [--apis chat,responses,…] [--rounds N] [--concurrency 1,32,128]

Sends the same prompts of 512 uncached tokens, with 16 streamed tokens each, through one router with
mock workers (as ``benchmarks.router`` does). In each round, one API is measured after the other.
Ratios are to the CPU time of chat completions in the same round. Prints a table, and JSON as the
last line.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.http_load import post
from benchmarks.peers.routers import baton
from benchmarks.router import ANSWER_TOKENS, REQUESTS, WARM_UP, ChatPrompts, measure
from testkit.machine import describe

REFERENCE = "chat"


def _chat(text: str) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": ANSWER_TOKENS}


def _completions(text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": text, "max_tokens": ANSWER_TOKENS}


def _responses(text: str) -> tuple[str, dict[str, Any]]:
    body = {"input": text, "max_output_tokens": ANSWER_TOKENS, "store": False}
    return "/v1/responses", body


def _stored_responses(text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": text, "max_output_tokens": ANSWER_TOKENS, "store": True}


def _messages(text: str) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return "/v1/messages", {"messages": messages, "max_tokens": ANSWER_TOKENS}


APIS: Mapping[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "chat": _chat,
    "completions": _completions,
    "responses": _responses,
    "stored": _stored_responses,
    "messages": _messages,
}


def requests(api: str, prompts: ChatPrompts, count: int) -> list[bytes]:
    """Return the bytes of ``count`` streaming requests to one API, each with another prompt."""
    made = []
    for _ in range(count):
        path, body = APIS[api](prompts.text())
        made.append(post(path, json.dumps({"model": "demo", "stream": True, **body}).encode()))
    return made


def main() -> None:
    options = _options()
    prompts = ChatPrompts(options.seed)
    apis = options.apis.split(",")
    cpu: dict[tuple[str, int], list[float]] = defaultdict(list)
    with baton(0.0) as router:
        for api in apis:
            measure(router, requests(api, prompts, WARM_UP), 32)
        for _ in range(options.rounds):
            for concurrency in map(int, options.concurrency.split(",")):
                for api in apis:
                    load = requests(api, prompts, REQUESTS[concurrency])
                    figures = measure(router, load, concurrency)
                    cpu[api, concurrency].append(figures.cpu_per_request)
    print(f"{describe()} seed {options.seed}, {options.rounds} rounds")
    print(f"{'API':18} {'at once':>7} {'CPU ms':>7} {'of chat':>7}")
    rows = []
    for (api, concurrency), values in sorted(cpu.items(), key=lambda item: item[0][1]):
        ratio = _median_ratio(values, cpu.get((REFERENCE, concurrency)))
        rows.append(
            {"api": api, "concurrency": concurrency, "cpu_ms": statistics.median(values)}
            | {"ratio_to_chat": ratio}
        )
        shown = f"{ratio:7.2f}" if ratio is not None else ""
        print(f"{api:18} {concurrency:7} {statistics.median(values):7.2f} {shown}")
    print(json.dumps({"machine": describe(), "rounds": options.rounds, "rows": rows}))


def _median_ratio(values: list[float], reference: list[float] | None) -> float | None:
    """Return the median, over the rounds, of ``values`` divided by ``reference``; None if there is
    no reference."""
    if not reference:
        return None
    return statistics.median(a / b for a, b in zip(values, reference, strict=True))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--apis", default=",".join(APIS), help="names of APIs, chat first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", default="1,32,128", help="levels to measure")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
