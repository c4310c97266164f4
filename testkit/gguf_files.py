"""Writes the GGUF file of a Hugging Face model, as llama.cpp's converter does."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors.torch import load_file

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3",
}  # fmt: skip
"""GGUF's name of each model type."""

PARTS = {
    "embed_tokens": "token_embd", "input_layernorm": "attn_norm", "q_proj": "attn_q",
    "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down", "gate": "ffn_gate_inp", "norm": "output_norm",
    "lm_head": "output",
}  # fmt: skip
GEMMA_PARTS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    model: Path, path: Path, kind: str = "F32", extra: dict[str, Any] | None = None
) -> Path:
    """Write the model in the folder ``model``, with byte-level BPE, to the file ``path``. ``kind``
    is the type of all matrices whose rows are whole blocks of it. ``extra`` are more keys, or other
    values for the usual ones; None leaves a key out."""
    config = json.loads((model / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    keys = {**_metadata(model, config, architecture), **(extra or {})}
    writer = gguf.GGUFWriter(path, keys.pop("general.architecture", architecture))
    for key, value in keys.items():
        if value is not None:
            _add(writer, key, value)
    for name, tensor in _tensors(model, config, architecture).items():
        data, of_type = _encode(tensor, kind)
        writer.add_tensor(name, data, raw_dtype=of_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _encode(tensor: np.ndarray[Any, Any], kind: str) -> tuple[Any, gguf.GGMLQuantizationType]:
    of_type = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[of_type]
    if tensor.ndim == 1 or tensor.shape[-1] % block or kind == "F32":
        return tensor, gguf.GGMLQuantizationType.F32
    return quantize(tensor, of_type), of_type


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _metadata(model: Path, config: dict[str, Any], architecture: str) -> dict[str, Any]:
    rope = config.get("rope_parameters", {})
    full = rope.get("full_attention", rope)
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config.get("sliding_window"),
        "rope.freq_base": float(full["rope_theta"]),
        "expert_count": config.get("num_experts", config.get("num_local_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }
    return {f"{architecture}.{key}": value for key, value in own.items()} | _vocabulary(model)


def _vocabulary(model: Path) -> dict[str, Any]:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    config = json.loads((model / "tokenizer_config.json").read_text())
    added = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    ids = {**tokenizer["model"]["vocab"], **added}
    tokens = sorted(ids, key=lambda token: ids[token])
    merges = [" ".join(each) for each in tokenizer["model"]["merges"]]
    if not merges:  # the writer leaves out empty lists, which no file of a real model has
        tokens, merges = [*tokens, "!!"], ["! !"]
    ends = json.loads((model / "config.json").read_text())["eos_token_id"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in added else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": ends[0] if isinstance(ends, list) else ends,
        "tokenizer.ggml.eot_token_id": ends[-1] if isinstance(ends, list) else None,
        "tokenizer.chat_template": config.get("chat_template"),
    }


def _tensors(
    model: Path, config: dict[str, Any], architecture: str
) -> dict[str, np.ndarray[Any, Any]]:
    parts = {**PARTS, **GEMMA_PARTS} if architecture == "gemma3" else PARTS
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    experts: dict[str, list[np.ndarray[Any, Any]]] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        data = tensor.float().numpy()
        *path, part, ending = name.split(".")
        layer = f"blk.{path[path.index('layers') + 1]}." if "layers" in path else ""
        if architecture == "llama" and part in ("q_proj", "k_proj"):
            heads = "num_attention_heads" if part == "q_proj" else "num_key_value_heads"
            data = _permuted(data, config[heads])
        if architecture == "gemma3" and part.endswith("norm"):
            data = data + np.float32(1)
        if "experts" in path:
            experts.setdefault(f"{layer}{parts[part]}_exps.{ending}", []).append(data)
        else:
            tensors[f"{layer}{parts[part]}.{ending}"] = data
    if config.get("tie_word_embeddings"):
        tensors.pop("output.weight", None)
    return tensors | {name: np.stack(each) for name, each in experts.items()}


def _permuted(data: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return the rows in llama.cpp's order: those of a head's two halves in turn."""
    halves = data.reshape(heads, 2, len(data) // heads // 2, *data.shape[1:])
    return halves.swapaxes(1, 2).reshape(data.shape).copy()
