"""Tests what a server brings by itself: adapters by name, speculative decoding, and tensor
parallelism of another degree on each side of a hand-over."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testkit.local_cluster import local_cluster
from testkit.lora_zoo import make_adapter
from testkit.machine import pause
from tests.vllm.e2e.stock_server import (
    ARGUMENTS,
    PLUGIN_ARGUMENT,
    TRANSFER,
    Server,
    prompt,
    vllm_serve,
)

pytestmark = pytest.mark.timeout(600)
TOKENS = 24
PROMPTS = [
    *(prompt(seed, length) for seed, length in enumerate((5, 100, 128, 300))),
    [7, 8, 9] * 30,
]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def test_adapters_by_name_and_speculation(models: dict[str, Path], tmp_path: Path) -> None:
    """The answers are those of the server, which adapters change and speculation does not."""
    model = models["llama"]
    adapter = make_adapter(tmp_path / "sql", model, alpha=64)
    speculating = (
        *[each for each in ARGUMENTS if each != PLUGIN_ARGUMENT],
        f"--speculative-config={json.dumps(NGRAM)}",
    )
    with_adapter = (*ARGUMENTS, "--enable-lora", f"--lora-modules=sql={adapter}")
    with ExitStack() as stack:
        fast, adapted = [
            stack.enter_context(vllm_serve(model, tmp_path / f"{name}.log", "0.32.0", 0, arguments))
            for name, arguments in (("fast", speculating), ("adapted", with_adapter))
        ]
        settings: dict[str, object] = {
            "attach": f"mixed={fast.url},mixed={adapted.url}",
            "admission": "off",
            "dtype": "float32",
        }
        cluster = stack.enter_context(
            local_cluster(model, 0, 0, mixed=2, settings=settings, timeout_seconds=400.0)
        )
        while "sql" not in [each["id"] for each in cluster.get("/v1/models")["data"]]:
            pause(0.1)
        for tokens in PROMPTS:
            base = adapted.complete(tokens, max_tokens=TOKENS, **GREEDY)
            other = adapted.complete(tokens, max_tokens=TOKENS, model="sql", **GREEDY)
            assert base != other
            assert cluster.complete(tokens, TOKENS, model="sql", **GREEDY) == other
            answers = [cluster.complete(tokens, TOKENS, **GREEDY) for _ in range(4)]
            assert answers == 4 * [base]
        assert fast.metric("vllm:spec_decode_num_draft_tokens_total") > 0


def test_a_hand_over_from_two_ranks_to_one(models: dict[str, Path], tmp_path: Path) -> None:
    model = models["llama"]
    kinds = {
        "prefill": (*ARGUMENTS, TRANSFER, "--tensor-parallel-size=2"),
        "decode": (*ARGUMENTS, TRANSFER),
        "alone": ARGUMENTS,
    }
    servers: dict[str, Server] = {}
    with ExitStack() as stack:
        for name, arguments in kinds.items():
            serve = vllm_serve(model, tmp_path / f"{name}.log", "0.32.0", 0, arguments)
            servers[name] = stack.enter_context(serve)
        settings: dict[str, object] = {
            "attach": f"prefill={servers['prefill'].url},decode={servers['decode'].url}",
            "admission": "off",
            "slo_itl_seconds": 0.001,  # no prompt is so short that the decode server computes it
        }
        cluster = stack.enter_context(
            local_cluster(model, 1, 1, settings=settings, timeout_seconds=400.0)
        )
        for tokens in PROMPTS:
            expected = servers["alone"].complete(tokens, max_tokens=TOKENS, **GREEDY)
            assert cluster.complete(tokens, TOKENS, **GREEDY) == expected, len(tokens)
        assert servers["decode"].metric("vllm:nixl_bytes_transferred_count") > 0
        assert servers["decode"].metric("vllm:nixl_num_failed_transfers_total") == 0
