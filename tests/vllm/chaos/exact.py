"""Hand-overs of prompts of many lengths, compared with a server that hands nothing over."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from testkit.local_cluster import LocalCluster
from tests.vllm.chaos.answers import (
    GREEDY,
    MOST_EXAMPLES,
    SAMPLED,
    Difference,
    find_difference,
    make_prompts,
)
from tests.vllm.chaos.site import FAILED, ChaosServer, Site, attached, running
from tests.vllm.e2e.stock_server import ARGUMENTS

SHORTEST, LONGEST = 5, 1500
TOKENS = 24
MOST_REPEATS = 5
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}
LARGER = "--max-model-len=2048"
"""Overrides the argument of the tests."""

Tokens = list[int]


def run(options: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    prompts = make_prompts(options.prompts, options.seed, SHORTEST, LONGEST)
    found = {
        dtype: compare(options, model, folder / dtype, prompts, dtype) for dtype in options.dtypes
    }
    return {"ok": all(each["ok"] for each in found.values()), **found}


def compare(
    options: argparse.Namespace, model: Path, folder: Path, prompts: list[Tokens], dtype: str
) -> dict[str, Any]:
    """Compare the answers with each sampling. In BF16, where steps of other shapes round
    differently, unequal answers are counted, but are no violation."""
    folder.mkdir()
    arguments = (*ARGUMENTS, LARGER, f"--dtype={dtype}")
    alone = ChaosServer("alone", "mixed", model, folder, options.version, arguments)
    with running([alone]):
        print(f"{dtype}: one server answers {len(prompts)} prompts", flush=True)
        expected = {
            name: [alone.server.complete(each, max_tokens=TOKENS, **sampling) for each in prompts]
            for name, sampling in SAMPLINGS.items()
        }
    servers = [
        ChaosServer(f"{role}-{number}", role, model, folder, options.version, arguments)
        for number in range(options.pairs)
        for role in ("prefill", "decode")
    ]
    found: dict[str, Any] = {"pairs": options.pairs}
    with running(servers), attached(model, servers, folder / "baton", dtype) as site:
        for name, answers in expected.items():
            found[name] = compare_sampling(site, prompts, answers, SAMPLINGS[name])
            print(f"{dtype}, {name}: {found[name]}", flush=True)
        found["read_late"] = site.log_count("kv_read_late")
        found["failed_transfers"] = sum(each.metric(FAILED) for each in servers)
        found["held"] = site.wait_until_nothing_is_held(60.0)
    is_equal = all(found[name]["equal"] == len(prompts) for name in SAMPLINGS)
    is_handed_over = all(found[name]["handed_over"] == len(prompts) for name in SAMPLINGS)
    found["ok"] = is_handed_over and not found["held"] and (is_equal or dtype != "float32")
    return found


def compare_sampling(
    site: Site, prompts: list[Tokens], expected: list[Tokens], sampling: dict[str, Any]
) -> dict[str, Any]:
    """Return how many answers are equal, and how many prompts were computed by one server and read
    by another."""
    before, reference = site.num_transfers(), site.servers[0].server
    differences: list[Difference | None] = []
    repeated = equal = handed_over = 0
    for prompt, right in zip(prompts, expected, strict=True):
        got, num_repeats, is_handed_over = answer_of_a_hand_over(site.cluster, prompt, sampling)
        repeated += num_repeats
        handed_over += is_handed_over
        equal += got == right
        if got != right and len(differences) < MOST_EXAMPLES:
            differences.append(find_difference(reference, prompt, right, got))
    return {
        "equal": equal,
        "of": len(prompts),
        "handed_over": handed_over,
        "transfers": int(site.num_transfers() - before),
        "repeated": repeated,
        "differences": [asdict(each) for each in differences if each is not None],
    }


def answer_of_a_hand_over(
    cluster: LocalCluster, prompt: Tokens, sampling: dict[str, Any]
) -> tuple[Tokens, int, bool]:
    """Return an answer, how often it was asked for again, and whether two servers made it. A server
    that is slow on a busy machine may pass for a frozen one, and others then answer without it."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "return_token_ids": True, **sampling}
    for num_repeats in range(MOST_REPEATS + 1):
        answer, headers = cluster.post_with_headers("/v1/completions", body)
        workers = {headers.get("x-baton-prefill"), headers.get("x-baton-decode")} - {None}
        if len(workers) == 2 and "x-baton-continuation" not in headers:
            return answer["choices"][0]["token_ids"], num_repeats, True
    return answer["choices"][0]["token_ids"], MOST_REPEATS, False
