"""Makes models with random weights in the shape of small published ones."""

import shutil
from pathlib import Path

import torch

from baton.config import DEMO_MODEL

VOCAB_SIZE = 4096
COMMON = {
    "head_dim": 64, "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "eos_token_id": 0,
    "bos_token_id": None, "pad_token_id": None, "initializer_range": 0.1,
}  # fmt: skip
SHAPES = {
    "0.5b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "50m": {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""The layers of models with 0.5 billion and with 50 million parameters. The vocabulary is that of
the demo model."""


def make_model(path: Path, seed: int, shape: str = "0.5b") -> int:
    """Write the model in BF16 to ``path``; return its number of parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**COMMON, **SHAPES[shape])).to(torch.bfloat16)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEMO_MODEL) / name, path)
    return sum(weight.numel() for weight in model.parameters())
