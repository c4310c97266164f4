"""Tests that a cluster generates the same tokens as transformers with each KV transport."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.system.portability import uses_linux
from testkit.local_cluster import local_cluster
from testkit.model_zoo import make_model
from tests.exactness import Reference, Score, compare_all, over_http, reference_of

pytestmark = pytest.mark.timeout(300)
SEED = 5
TOKENS = 16
LENGTHS = [1, 15, 16, 17, 64, 129, 300, 900]
CELLS = [
    pytest.param("shm", "qwen3-moe", 16, 16),
    pytest.param(
        "nixl", "qwen3-odd", 128, 16,
        marks=pytest.mark.skipif(not uses_linux(), reason="NIXL exists only for Linux"),
    ),
    pytest.param("grpc", "llama", 128, 64),
]  # fmt: skip


def references(path: Path) -> list[Reference]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    chance = np.random.default_rng(SEED)
    prompts = [chance.integers(model.config.vocab_size, size=n).tolist() for n in LENGTHS]
    return [reference_of(model, prompt, TOKENS) for prompt in prompts]


@pytest.mark.parametrize(("transport", "architecture", "chunk", "block"), CELLS)
def test_tokens_over_each_transport_equal_the_reference(
    transport: str, architecture: str, chunk: int, block: int, tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    expected = references(make_model(tmp_path, architecture, seed=SEED))
    settings = {
        "transports": transport, "chunk_tokens": chunk, "block_tokens": block,
        "pool_bytes": "64MiB", "api_keys": "one=a,many=b",
    }  # fmt: skip
    with local_cluster(tmp_path, settings=settings) as cluster:
        for key, at_once in (("one", 1), ("many", len(expected))):
            for _cache in ("cold", "warm"):
                score = compare_all(expected, over_http(cluster, key), at_once)
                assert score == Score(TOKENS * len(LENGTHS), ties=0, differences=0)
        body = {"prompt": expected[-1].prompt[::-1], "max_tokens": 2, "ignore_eos": True}
        _, headers = replace(cluster, api_key="one").post_with_headers("/v1/completions", body)
        assert headers["x-baton-transport"] == {"nixl": "nixl_local"}.get(transport, transport)
        assert int(headers["x-baton-kv-transfer-bytes"]) > 0
