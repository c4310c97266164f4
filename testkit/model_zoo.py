"""Writes tiny, randomly initialised Hugging Face models of every architecture that Baton's own
engine supports."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": None,
    # Larger than usual, so that the best two logits are seldom close.
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

SLIDING_WINDOW = 64

Maker = tuple[Callable[..., PretrainedConfig], Callable[..., PreTrainedModel], dict[str, Any]]

ZOO: dict[str, Maker] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "llama3-rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": LLAMA3_ROPE, "head_dim": 24, "vocab_size": 1003},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"head_dim": 32, "tie_word_embeddings": True, "eos_token_id": [1, 2]},
    ),
    "qwen3-odd": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 777},
    ),
    "qwen3-moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "num_hidden_layers": 3,
        },
    ),
    "mistral": (
        MistralConfig,
        MistralForCausalLM,
        {"num_key_value_heads": 1, "sliding_window": None, "head_dim": 16},
    ),
    "llama-biased": (  # in all linear layers
        LlamaConfig,
        LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3-window": (  # in the last of three layers; and biases in attention
        Qwen3Config,
        Qwen3ForCausalLM,
        {
            "head_dim": 32,
            "attention_bias": True,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "max_window_layers": 2,
            "sliding_window": 50,
        },
    ),
    "mistral-window": (  # in all layers
        MistralConfig,
        MistralForCausalLM,
        {"sliding_window": SLIDING_WINDOW, "head_dim": 16, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "gemma3": (  # five of six layers have a sliding window
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 32,
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 24,
            "sliding_window": SLIDING_WINDOW,
        },
    ),
    "gpt-oss": (  # sliding windows in every second layer, attention sinks, experts
        GptOssConfig,
        GptOssForCausalLM,
        {
            "head_dim": 32,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": SLIDING_WINDOW,
        },
    ),
}


def make_model(
    path: Path,
    name: str,
    *,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **changes: Any,
) -> Path:
    """Write a directory with weights, configs and a byte-level tokenizer; return ``path``."""
    make_config, make, fields = ZOO[name]
    config = make_config(**{**BASE, **fields, **changes})
    torch.manual_seed(seed)
    model = make(config).to(dtype).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("norm.weight", "bias")):
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """Write a tokenizer with three special tokens (ids 0 to 2), then the bytes (3 to 258)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(path / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    settings = {"chat_template": template, "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
