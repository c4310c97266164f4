"""Writes random LoRA adapters for the models of the zoo, in the format of peft."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from baton.checkpoints.adapter_checkpoint import CONFIG_FILE, WEIGHTS_FILE, target_modules
from baton.checkpoints.checkpoint import load_model_config

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def make_adapter(
    path: Path,
    model: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = (*ATTENTION, *MLP),
    ranks: Mapping[str, int] = {},
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Path:
    """Write a random adapter for ``model`` and return ``path``. ``ranks`` are the ranks of
    projections that differ from ``rank``; ``options`` go into adapter_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "rank_pattern": dict(ranks),
        "bias": "none",
        "inference_mode": True,
        **options,
    }
    (path / CONFIG_FILE).write_text(json.dumps(config))
    save_file(make_tensors(model, seed, rank, targets, ranks, dtype), path / WEIGHTS_FILE)
    return path


def make_tensors(
    model: Path,
    seed: int,
    rank: int,
    targets: Sequence[str],
    ranks: Mapping[str, int] = {},
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Return the tensors of a random adapter. They are large enough that each adapter gives
    another answer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in target_modules(load_model_config(model)):
        if module.projection in targets:
            own = ranks.get(module.projection, rank)
            prefix = f"base_model.model.{module.name}"
            a = torch.randn(own, module.ins, generator=generator) * 0.2
            b = torch.randn(module.outs, own, generator=generator) * 0.2
            tensors[f"{prefix}.lora_A.weight"] = a.to(dtype)
            tensors[f"{prefix}.lora_B.weight"] = b.to(dtype)
    return tensors
