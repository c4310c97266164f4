"""Tests that a cluster serves a prompt longer than its workers' pools if the request has an
attention window, with the tokens of transformers under the same mask."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.checkpoints.checkpoint import load_model_config
from baton.core.attention_window import AttentionWindow
from baton.engine.kv_pool import block_bytes
from baton.engine.layer_groups import LayerGroups
from testkit.local_cluster import local_cluster
from testkit.model_zoo import make_model
from tests.exactness import Score, compare
from tests.masked_reference import masked_reference_of

pytestmark = pytest.mark.timeout(300)
SEED, LENGTH, TOKENS, BLOCK_TOKENS = 5, 1000, 12, 16
WINDOW = AttentionWindow(sink_tokens=20, recent_tokens=100)
FIELD = {"sink_tokens": WINDOW.sink_tokens, "recent_tokens": WINDOW.recent_tokens}
NUM_BLOCKS = 15
"""A prompt needs 2 blocks with sinks; and the 99 tokens before a chunk of 64 tokens, and these, are
in at most 12 blocks. The prompt has 63 blocks."""

NUM_TRANSFERRED = 2 + 63 - (LENGTH - WINDOW.recent_tokens + 1) // BLOCK_TOKENS
"""The blocks that the token after the prompt reads."""


def test_prompt_longer_than_the_pools_gets_the_tokens_of_the_mask(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    make_model(tmp_path, "qwen3", seed=SEED)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = np.random.default_rng(SEED).integers(2, 500, size=LENGTH).tolist()
    expected = masked_reference_of(model, prompt, TOKENS, WINDOW)
    config = load_model_config(tmp_path)
    size = block_bytes(config, torch.float32, BLOCK_TOKENS, LayerGroups.of(config))
    settings: dict[str, object] = {
        "transports": "shm", "block_tokens": BLOCK_TOKENS, "pool_bytes": NUM_BLOCKS * size,
        "max_batched_tokens": 64, "api_keys": "one=a,other=b",
    }  # fmt: skip
    with local_cluster(tmp_path, settings=settings) as cluster:
        one, other = (replace(cluster, api_key=key) for key in ("one", "other"))

        def generate(tokens: list[int], count: int) -> list[int]:
            return one.complete(
                tokens, count, temperature=0, ignore_eos=True, attention_window=FIELD
            )

        for _cache in ("cold", "warm"):
            score = compare(expected, generate)
            assert score == Score(TOKENS, ties=0, differences=0)
        body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
        _, headers = other.post_with_headers("/v1/completions", body | {"attention_window": FIELD})
        assert int(headers["x-baton-kv-transfer-bytes"]) == NUM_TRANSFERRED * size
        # The conductor refuses it, or the worker if the conductor does not know its memory yet.
        too_large = "largest decode worker has memory for 240|the worker has only 15"
        with pytest.raises(RuntimeError, match=too_large):
            other.post("/v1/completions", body)
