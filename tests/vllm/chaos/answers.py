"""Prompts, the answers of one undisturbed server, and what became of answers under faults."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from testkit.streams import CompletionCase, StreamedAnswer
from tests.vllm.e2e.stock_server import Server

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
BLOCK_TOKENS = 128
MOST_EXAMPLES = 10


def block_boundaries(shortest: int, longest: int) -> list[int]:
    """Return the lengths that fill blocks, and their neighbours."""
    fills = range(BLOCK_TOKENS, longest + 1, BLOCK_TOKENS)
    lengths = [fill + more for fill in fills for more in (-1, 0, 1)]
    return [each for each in lengths if shortest <= each <= longest]


def make_prompts(count: int, seed: int, shortest: int, longest: int) -> list[list[int]]:
    """Make prompts of evenly spread lengths, the boundaries of blocks among them."""
    chance = np.random.default_rng(seed)
    lengths = block_boundaries(shortest, longest)
    if len(lengths) > count // 2:
        lengths = sorted(chance.choice(lengths, count // 2, replace=False).tolist())
    spread = np.linspace(shortest, longest, count - len(lengths)).astype(int)
    lengths = [*lengths, *spread.tolist()]
    return [chance.integers(10, 400, size=length).tolist() for length in lengths]


def ask_greedily(server: Server, prompts: Sequence[list[int]], seed: int) -> list[CompletionCase]:
    """Return requests for greedy streams of various lengths, with the server's answers."""
    chance = np.random.default_rng(seed)
    cases = []
    for prompt in prompts:
        fields = {**GREEDY, "max_tokens": int(chance.integers(40, 121))}
        body = {"prompt": prompt, "return_token_ids": True, "stream": True, **fields}
        cases.append(CompletionCase(body, tuple(server.complete(prompt, **fields))))
    return cases


@dataclass(frozen=True)
class Difference:
    """Where an answer differs from the server's. ``margin`` is how much more probable the server's
    token is than its second choice, as a difference of logprobs; a small one explains that a step
    of another shape chose another token."""

    prompt_tokens: int
    index: int
    expected: int
    got: int
    margin: float


def find_difference(
    server: Server, prompt: list[int], expected: Sequence[int], got: Sequence[int]
) -> Difference | None:
    for index, (right, wrong) in enumerate(zip(expected, got, strict=False)):
        if right != wrong:
            known = [*prompt, *expected[:index]]
            margin = _margin(server, known)
            return Difference(len(prompt), index, right, wrong, round(margin, 6))
    return None


def _margin(server: Server, prompt: list[int]) -> float:
    body = {"model": "served", "prompt": prompt, "max_tokens": 1, "logprobs": 2, **GREEDY}
    choice = json.loads(server.ask("/v1/completions", body))["choices"][0]
    best, second = sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)[:2]
    return float(best - second)


def is_whole(answer: StreamedAnswer) -> bool:
    return not answer.error and len(answer.tokens) == len(answer.case.tokens)


def is_wrong(answer: StreamedAnswer) -> bool:
    """Whether the client got a token that is not the server's."""
    return tuple(answer.tokens) != answer.case.tokens[: len(answer.tokens)]


def summarize(answers: Sequence[StreamedAnswer], server: Server) -> dict[str, Any]:
    """Count answers. ``wrong`` are those with a token that is not the server's."""
    wrong = [each for each in answers if is_wrong(each)]
    differences = [
        find_difference(server, each.case.body["prompt"], each.case.tokens, each.tokens)
        for each in wrong[:MOST_EXAMPLES]
    ]
    begun = [each for each in answers if each.token_times]
    gaps = [each.max_inter_token_seconds for each in begun]
    first = [each.token_times[0] - each.started_at for each in begun]
    return {
        "answers": len(answers),
        "whole": sum(map(is_whole, answers)),
        "equal": sum(each.is_right for each in answers),
        "wrong": len(wrong),
        "refused": sum(each.is_refused for each in answers),
        "errors": dict(Counter(_kind(each.error) for each in answers if each.error)),
        "differences": [vars(each) for each in differences if each is not None],
        "longest_gap_seconds": _percentiles(gaps),
        "time_to_first_token_seconds": _percentiles(first),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99, longest = np.percentile(seconds or [0.0], (50, 99, 100)).tolist()
    return {"p50": round(p50, 2), "p99": round(p99, 2), "max": round(longest, 2)}


def _kind(error: str) -> str:
    """Return an error without what differs from one request to the next."""
    words = (word for word in error.split() if not any(each.isdigit() for each in word))
    return " ".join(words)[:160]
