"""Check that clusters whose KV is encoded losslessly give the tokens of transformers, in FP32.

    python -m tests.codec_exactness [--architectures A,B] [--transports shm,nixl,nixl-tcp,grpc]
                                    [--limit-link MEGABYTES_PER_SECOND]

For each architecture and transport, a cluster answers the same prompts four times: with empty
caches; from the store's DRAM; after a restart, from its SSD; and from the blocks that were promoted
from there to DRAM. Other prompts are sent between the passes, so that none of these prompts is left
in the workers' own caches, even if the model's windows let many of them fit. A cell counts only if
blocks were really encoded: on the link, in DRAM or on the SSD. With ``--store-codec none``, blocks
are encoded when they are demoted. Prints a table, and JSON as the last line. Exits with 1 if tokens
differ, or if all blocks of a tier or of a limited link were raw.

The conductor decides how KV travels, and on a fast link it finds raw KV faster. With
``--limit-link``, everything runs in a network namespace whose loopback is so slow (this needs
root), and of the KV transfers of the four passes over ``nixl-tcp`` and ``grpc`` some must be
encoded. KV over ``shm`` and over ``nixl`` within a host does not use that link; there, only the
store's blocks have to be encoded.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import describe
from testkit.model_zoo import make_model
from tests.exactness import Reference, Score, compare, reference_of

PROMPT_TOKENS = 400
POOL_BLOCKS = 80
"""Blocks of each worker: the prompts of two or three requests."""

NUM_OTHER_PROMPTS = 24
"""Prompts sent to replace those in the workers' caches."""

MAX_WARM_UP = 40
MIN_ENCODED_SHARE = 0.9
"""Blocks that would not become smaller stay raw; these are few."""

TRANSPORTS: dict[str, dict[str, object]] = {
    "shm": {"transports": "shm"},
    "nixl": {"transports": "nixl"},
    "nixl-tcp": {"transports": "nixl", "nixl_interfaces": "lo", "nixl_private_network": True},
    "grpc": {"transports": "grpc"},
}

NETWORK_TRANSPORTS = ("nixl-tcp", "grpc")
"""The transports over which KV has to travel encoded if the link is limited."""

LINK_MTU, LINK_BURST_BYTES = 1500, 8192
"""Loopback's usual packets of 64 KiB would pass a limited link in bursts."""

IN_NAMESPACE = "BATON_EXACTNESS_NAMESPACE"


@dataclass
class Pass:
    """What one pass over all prompts gave. ``transports`` are those of its KV transfers, of which
    ``num_encoded`` of ``num_transfers`` were encoded; ``cached`` are prompt tokens by tier."""

    score: Score = field(default_factory=Score)
    transports: set[str] = field(default_factory=set)
    num_transfers: int = 0
    num_encoded: int = 0
    cached: dict[str, int] = field(default_factory=dict)

    def add(self, explained: dict[str, Any]) -> None:
        details = explained["details"]
        if int(details.get("kv_transfer_bytes", 0)):
            self.num_transfers += 1
            self.num_encoded += details["kv_transfer_codec"] == "lossless"
            self.transports.add(explained["transport"])
        for tier, count in explained["cached_tokens_by_tier"].items():
            self.cached[tier] = self.cached.get(tier, 0) + count


def run_pass(cluster: LocalCluster, references: Sequence[Reference]) -> Pass:
    """Answer all prompts, one after the other."""
    result = Pass()

    def generate(prompt: list[int], count: int) -> list[int]:
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        answer, headers = cluster.post_with_headers(
            "/v1/completions", body | {"return_token_ids": True}
        )
        result.add(cluster.get(f"/admin/requests/{headers['x-baton-request-id']}"))
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    for reference in references:
        result.score += compare(reference, generate)
    return result


def check_store(cluster: LocalCluster) -> None:
    [stats] = json.loads(cluster.baton("kv", "stats", "--json").stdout).values()
    assert stats["violation"] == "" and stats["checksum_failures"] == 0, stats


def encoded_share(cluster: LocalCluster) -> float:
    """Return the share of the store's blocks that are encoded."""
    listing = cluster.baton("kv", "ls", "--limit", "1000", "--json").stdout
    [listed] = json.loads(listing).values()
    codecs = [block["codec"] for block in listed["blocks"]]
    return codecs.count("lossless") / max(len(codecs), 1)


def replace_device_caches(cluster: LocalCluster, first_token: int) -> None:
    """Send other prompts, so that the workers evict all blocks that they have."""
    for number in range(NUM_OTHER_PROMPTS):
        prompt = [first_token + number] * PROMPT_TOKENS
        cluster.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "ignore_eos": True})


def warm_up_link(cluster: LocalCluster) -> None:
    """Send prompts until one's KV travels encoded: the conductor has measured the link by then. At
    first it expects a fast link, on which KV travels raw."""
    for number in range(MAX_WARM_UP):
        body = {"prompt": [10 + number] * PROMPT_TOKENS, "max_tokens": 2, "ignore_eos": True}
        _, headers = cluster.post_with_headers("/v1/completions", body)
        explained = cluster.get(f"/admin/requests/{headers['x-baton-request-id']}")
        if explained["details"].get("kv_transfer_codec") == "lossless":
            return


def enter_slow_namespace(megabytes_per_second: float) -> None:
    """Run this program again, in a network namespace whose loopback has the given speed; return if
    it runs there already. Raises CalledProcessError if the link can't be limited."""
    if IN_NAMESPACE not in os.environ:
        os.environ[IN_NAMESPACE] = "1"
        program = [sys.executable, "-m", "tests.codec_exactness", *sys.argv[1:]]
        os.execvp("unshare", ["unshare", "--net", *program])
    bits = int(8e6 * megabytes_per_second)
    for command in (
        f"ip link set lo mtu {LINK_MTU} up",
        f"tc qdisc add dev lo root tbf rate {bits}bit burst {LINK_BURST_BYTES} latency 1s",
    ):
        subprocess.run(command.split(), check=True)


@contextmanager
def ucx_transports(transport: str) -> Iterator[None]:
    """Let UCX use TCP only for ``nixl-tcp``; by itself, it reads the memory of the same host."""
    with patch.dict(os.environ, {"UCX_TLS": "tcp,self"} if transport == "nixl-tcp" else {}):
        yield


def run_cluster(
    model: Path,
    references: Sequence[Reference],
    transport: str,
    store_codec: str,
    is_limited: bool,
) -> Iterator[tuple[str, Pass, str]]:
    """Yield each pass with its name, and what was not encoded in it although it should be."""
    settings: dict[str, object] = {
        "dtype": "float32", "num_blocks": POOL_BLOCKS, "max_model_tokens": 700, "threads": 1,
        "store_bytes": 64 << 20, "store_disk_bytes": 64 << 20, "store_reload": "fetch",
        "store_timeout_seconds": 5, "kv_codec_wire": "lossless", "kv_codec_store": store_codec,
        "kv_codec_disk": "lossless", **TRANSPORTS[transport],
    }  # fmt: skip

    def raw_store() -> str:
        return "" if encoded_share(cluster) > MIN_ENCODED_SHARE else "the store"

    with ucx_transports(transport), local_cluster(model, settings=settings) as cluster:
        must_encode = is_limited and transport in NETWORK_TRANSPORTS
        if must_encode:
            warm_up_link(cluster)
        cold = run_pass(cluster, references)
        yield "cold", cold, ""
        replace_device_caches(cluster, 60)
        dram = run_pass(cluster, references)
        yield "dram", dram, unused(dram, "dram") or (raw_store() if store_codec != "none" else "")
        cluster.baton("down")
        port = cluster.url.rpartition(":")[2]
        cluster.baton("up", "--detach", "--port", port, "--model", str(model))
        ssd = run_pass(cluster, references)
        yield "ssd", ssd, unused(ssd, "disk") or raw_store()
        replace_device_caches(cluster, 90)
        promoted = run_pass(cluster, references)
        num_encoded = sum(each.num_encoded for each in (cold, dram, ssd, promoted))
        raw_link = "the link" if must_encode and not num_encoded else ""
        yield "promoted", promoted, unused(promoted, "dram") or raw_store() or raw_link
        check_store(cluster)


def unused(result: Pass, tier: str) -> str:
    return "" if result.cached.get(tier, 0) else f"no token came from {tier}; cells of it"


def references_of(model: Path, seed: int, prompts: int, tokens: int) -> list[Reference]:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    chance = np.random.default_rng(seed)
    shape = (prompts, PROMPT_TOKENS)
    rows = chance.integers(reference.config.vocab_size, size=shape).tolist()
    return [reference_of(reference, row, tokens) for row in rows]


def run(options: argparse.Namespace, report: Callable[[dict[str, Any]], None]) -> None:
    for name in options.architectures:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder), name, seed=options.seed)
            references = references_of(model, options.seed, options.prompts, options.tokens)
            for transport in options.transports:
                for cache, result, raw in run_cluster(
                    model, references, transport, options.store_codec, bool(options.limit_link)
                ):
                    counts = {k: v for k, v in vars(result).items() if k != "score"}
                    counts["transports"] = sorted(result.transports)
                    report(
                        {"architecture": name, "transport": transport, "cache": cache, "raw": raw}
                        | vars(result.score)
                        | counts
                    )


def main(arguments: list[str]) -> int:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--architectures", type=names, default=["llama", "qwen3", "gemma3"])
    parser.add_argument("--transports", type=names, default=list(TRANSPORTS))
    parser.add_argument("--store-codec", choices=["lossless", "none"], default="lossless")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-link", type=float, metavar="MEGABYTES_PER_SECOND")
    options = parser.parse_args(arguments)
    if options.limit_link:
        enter_slow_namespace(options.limit_link)
    torch.set_num_threads(2)
    print(describe())
    cells: list[dict[str, Any]] = []

    def report(cell: dict[str, Any]) -> None:
        cells.append(cell)
        cached = ", ".join(f"{tier} {count}" for tier, count in cell["cached"].items() if count)
        print(
            f"{cell['architecture']:12} {cell['transport']:9} {cell['cache']:9} "
            f"{cell['tokens']:6} tokens, {cell['ties']} ties, {cell['differences']} different; "
            f"{cell['num_encoded']} of {cell['num_transfers']} transfers encoded "
            f"({', '.join(cell['transports'])}); cached: {cached or 'none'}"
            + (f"; RAW: {cell['raw']}" if cell["raw"] else ""),
            flush=True,
        )

    run(options, report)
    ok = not any(cell["differences"] or cell["raw"] for cell in cells)
    print(json.dumps({"ok": ok, "seed": options.seed, "cells": cells}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
