"""Tests that a cluster whose model has sliding windows in all layers holds and transfers no more KV
for a long context than the window needs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.checkpoint import load_model_config
from tests.model_zoo import make_model
from tools.exactness import Score, compare, over_http, reference_of
from tools.local_cluster import local_cluster

pytestmark = pytest.mark.timeout(300)
SEED = 7
TOKENS = 24
WINDOW = 256
BLOCK_TOKENS = 16


@pytest.mark.parametrize("length", [1000, 16_000])
def test_kv_of_a_long_context_is_bounded_by_the_window(tmp_path: Path, length: int) -> None:
    """The pools have room for 128 blocks, and a context of 16,000 tokens has 1,000."""
    print(f"seed {SEED}")
    make_model(
        tmp_path, "mistral-window", seed=SEED, sliding_window=WINDOW, max_position_embeddings=20_000
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = np.random.default_rng(SEED).integers(500, size=length).tolist()
    expected = reference_of(model, prompt, TOKENS, chunk=1000)
    block_bytes = BLOCK_TOKENS * load_model_config(tmp_path).kv_elements_per_token * 4
    settings = {
        "transports": "shm", "block_tokens": BLOCK_TOKENS, "pool_bytes": 128 * block_bytes,
        "api_keys": "one=a,other=b", 
    }  # fmt: skip
    first = (length - WINDOW + 1) // BLOCK_TOKENS
    needed_bytes = (-(-length // BLOCK_TOKENS) - first) * block_bytes
    with local_cluster(tmp_path, settings=settings) as cluster:
        for _cache in ("cold", "warm"):
            score = compare(expected, over_http(cluster, "one"))
            assert score == Score(TOKENS, ties=0, differences=0)
        body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
        _, headers = replace(cluster, api_key="other").post_with_headers("/v1/completions", body)
        assert int(headers["x-baton-kv-transfer-bytes"]) == needed_bytes
