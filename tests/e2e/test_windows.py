"""Tests that a cluster whose model has sliding windows holds and transfers no more KV for a long
context than its layers read."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.checkpoints.checkpoint import load_model_config
from baton.engine.kv_pool import block_bytes
from baton.engine.layer_groups import LayerGroups
from testkit.local_cluster import local_cluster
from testkit.model_zoo import make_model
from tests.exactness import Score, compare, over_http, reference_of

pytestmark = pytest.mark.timeout(300)
SEED = 7
TOKENS = 24
WINDOW = 256
BLOCK_TOKENS = 16


@pytest.mark.parametrize(
    ("name", "length", "num_blocks"),
    [
        ("mistral-window", 1000, 128),
        ("mistral-window", 16_000, 128),
        ("gemma3", 4000, 251 + 5 * 60),
        ("gpt-oss", 4000, 251 + 60),
    ],
)
def test_layers_with_a_window_keep_no_more_than_it(
    tmp_path: Path, name: str, length: int, num_blocks: int
) -> None:
    """A context of 16,000 tokens has 1,000 blocks in each group of layers, and one of 4,000 has
    250. All layers of the first model have a window, five of six of the second's, and half of the
    third's; a prompt holds 49 blocks in each group that has one."""
    print(f"seed {SEED}")
    make_model(tmp_path, name, seed=SEED, sliding_window=WINDOW, max_position_embeddings=20_000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = np.random.default_rng(SEED).integers(500, size=length).tolist()
    expected = reference_of(model, prompt, TOKENS, chunk=1000)
    config = load_model_config(tmp_path)
    groups = LayerGroups.of(config)
    size = block_bytes(config, torch.float32, BLOCK_TOKENS, groups)
    settings = {
        "transports": "shm", "block_tokens": BLOCK_TOKENS, "pool_bytes": num_blocks * size,
        "api_keys": "one=a,other=b",
    }  # fmt: skip
    num_spans = -(-length // BLOCK_TOKENS)
    num_windowed_spans = num_spans - (length - WINDOW + 1) // BLOCK_TOKENS
    num_needed = groups.num_full * num_spans + groups.num_windowed * num_windowed_spans
    with local_cluster(tmp_path, settings=settings) as cluster:
        for _cache in ("cold", "warm"):
            score = compare(expected, over_http(cluster, "one"))
            assert score == Score(TOKENS, ties=0, differences=0)
        body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
        _, headers = replace(cluster, api_key="other").post_with_headers("/v1/completions", body)
        assert int(headers["x-baton-kv-transfer-bytes"]) == num_needed * size
