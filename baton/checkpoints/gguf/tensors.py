"""Lists the tensors of a GGUF file by the names that they have in Hugging Face checkpoints."""

import re
from typing import Any

from gguf.gguf_reader import ReaderTensor

from baton.checkpoints.gguf.metadata import GgufFile
from baton.errors import Invalid

BLOCK_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""The types of tensors that can be read."""

NOT_READ = {"rope_freqs.weight"}
"""Tensors that config.json describes."""

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
"""A part's name in GGUF and in checkpoints; ``*`` stands for the number of an expert."""

GEMMA_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)")


def list_tensors(file: GgufFile) -> dict[str, dict[str, Any]]:
    """Return where each tensor lies, by its name in Hugging Face checkpoints:

    - ``type``, of :data:`BLOCK_TYPES`; ``shape`` [outs, ins] or [size]; ``offset`` in bytes;
    - ``heads``, in the projections of queries and keys of ``llama``: llama.cpp orders the rows of
      each head differently, first those of one half and of the other in turn;
    - ``subtract``, in the norms of Gemma, to whose weights llama.cpp adds 1.

    Raises Invalid for a type or a tensor that is not supported.
    """
    names = {**NAMES, **GEMMA_NAMES} if file.architecture == "gemma3" else NAMES
    listed: dict[str, dict[str, Any]] = {}
    for tensor in file.tensors.values():
        if tensor.name not in NOT_READ:
            listed |= _entries(file, tensor, names)
    return listed


def _entries(
    file: GgufFile, tensor: ReaderTensor, names: dict[str, str]
) -> dict[str, dict[str, Any]]:
    found = _NAME.fullmatch(tensor.name)
    if found is None or found[2] not in names:
        raise Invalid(
            f"{file.path}: the tensor {tensor.name} is not supported for {file.architecture}"
        )
    if tensor.tensor_type.name not in BLOCK_TYPES:
        raise Invalid(
            f"{file.path}: {tensor.name} is in {tensor.tensor_type.name}; supported types: "
            f"{', '.join(BLOCK_TYPES)}"
        )
    layer = "" if found[1] is None else f"model.layers.{found[1]}."
    name = f"{layer}{names[found[2]]}.{found[3]}"
    shape = [int(size) for size in reversed(tensor.shape)]
    entry: dict[str, Any] = {
        "type": tensor.tensor_type.name,
        "shape": shape,
        "offset": int(tensor.data_offset),
        "size": int(tensor.n_bytes),
    }
    if file.architecture == "llama" and found[2] in ("attn_q", "attn_k"):
        key = "attention.head_count" if found[2] == "attn_q" else "attention.head_count_kv"
        entry["heads"] = file.own(key, file.require_own("attention.head_count", int))
    if file.architecture == "gemma3" and found[2].endswith("norm"):
        entry["subtract"] = 1.0
    return _experts(name, entry) if "*" in name else {name: entry}


def _experts(name: str, entry: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the entries of the single experts, whose matrices lie behind one another."""
    count, *shape = entry["shape"]
    size = entry["size"] // count
    return {
        name.replace("*", str(expert)): {
            **entry, "shape": shape, "offset": entry["offset"] + expert * size, "size": size,
        }
        for expert in range(count)
    }  # fmt: skip
