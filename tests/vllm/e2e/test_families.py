"""Tests one server of each kind of model, which needs nothing of Baton: experts, sliding windows,
sinks, latent attention, and recurrent layers beside attention."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, PretrainedConfig, Qwen3NextConfig

from testkit.local_cluster import local_cluster
from tests.vllm.e2e.stock_server import ARGUMENTS, prompt, vllm_serve

pytestmark = pytest.mark.timeout(600)
SEED = 3
TOKENS = 24
LENGTHS = (5, 40, 300)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": 1,
}
NOT_OURS: dict[str, type[PretrainedConfig]] = {
    "latent attention": DeepseekV2Config,
    "recurrent layers": Qwen3NextConfig,
}
"""Models that Baton's own engine does not have."""

SIZES: dict[str, dict[str, Any]] = {
    "latent attention": {
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "q_lora_rank": None,
        "topk_group": 1,
        "n_group": 1,
        "first_k_dense_replace": 1,
    },
    "recurrent layers": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "shared_expert_intermediate_size": 64,
    },
}
IN_BF16 = {"gpt-oss", "recurrent layers"}
"""vLLM's kernels for these on CPUs need it."""


def make_other(path: Path, kind: str, tokenizer_of: Path) -> Path:
    """Write a small random model of ``NOT_OURS`` with the tokenizer of another."""
    print(f"seed {SEED}")
    vocab_size = json.loads((tokenizer_of / "config.json").read_text())["vocab_size"]
    config = NOT_OURS[kind](vocab_size=vocab_size, **COMMON, **SIZES[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.08, generator=generator)
    model.save_pretrained(path)
    for file in tokenizer_of.glob("*token*"):
        shutil.copy(file, path)
    return path


@pytest.mark.parametrize("kind", ["qwen3-moe", "gemma3", "gpt-oss", *NOT_OURS])
def test_answers_are_the_servers(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    known = models.get(kind)
    model = known or make_other(tmp_path / "model", kind, models["llama"])
    arguments = tuple(
        "--dtype=bfloat16" if each == "--dtype=float32" and kind in IN_BF16 else each
        for each in ARGUMENTS
    )
    with vllm_serve(model, tmp_path / "log", "0.32.0", 0, arguments) as server:
        settings: dict[str, object] = {"attach": f"mixed={server.url}", "admission": "off"}
        with local_cluster(model, 0, 0, settings, mixed=1, timeout_seconds=400.0) as cluster:
            for seed, length in enumerate(LENGTHS):
                tokens = prompt(seed, length)
                expected = server.complete(tokens, max_tokens=TOKENS, **GREEDY)
                assert len(set(expected)) > 2
                assert cluster.complete(tokens, TOKENS, **GREEDY) == expected, length
