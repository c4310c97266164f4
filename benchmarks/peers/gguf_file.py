"""Converts a Qwen3 checkpoint to a GGUF file for llama.cpp, without changing the values of the
weights. Needs gguf and numpy.

The vocabulary is empty: tokens are passed as numbers.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Maps tensor names in safetensors files, without the layer's number, to their names in GGUF."""


def write(model: Path, to: Path) -> None:
    """Write the GGUF file. ``model`` is a directory with one safetensors file, in BF16 or FP32."""
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(str(to), "qwen3")
    _describe(writer, config)
    for name, kind, shape, raw in _tensors(model / "model.safetensors"):
        if config["tie_word_embeddings"] and name == "lm_head.weight":
            continue
        _add(writer, _translated(name), kind, shape, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(_theta(config))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _theta(config: dict[str, Any]) -> float:
    """Return the RoPE theta, which different versions of transformers store in different places."""
    rope = config.get("rope_parameters") or config
    return float(rope["rope_theta"])


def _translated(name: str) -> str:
    """Translate a tensor's name: ``model.layers.3.mlp.up_proj.weight`` becomes
    ``blk.3.ffn_up.weight``."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.weight"
    number, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{NAMES[part]}.weight"


def _tensors(path: Path) -> Iterator[tuple[str, str, list[int], Any]]:
    """Yield the name, format, shape and raw bytes of each tensor in the file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + size)
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield name, entry["dtype"], entry["shape"], data[first:last]


def _add(writer: Any, name: str, kind: str, shape: list[int], raw: Any) -> None:
    """Add a tensor. A matrix is added as it is; a norm is converted to FP32, since llama.cpp
    supports no other format for norms."""
    if kind == "F32":
        writer.add_tensor(name, raw.view(np.float32).reshape(shape))
    elif len(shape) == 1:
        wide = raw.view(np.uint16).astype(np.uint32) << 16
        writer.add_tensor(name, wide.view(np.float32).reshape(shape))
    else:
        rows = raw.reshape(*shape[:-1], 2 * shape[-1])
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
