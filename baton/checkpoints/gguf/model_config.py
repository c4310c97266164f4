"""Converts the metadata of a GGUF file to the config.json of the same model."""

import math
from typing import Any

import numpy as np

from baton.checkpoints.gguf.metadata import GgufFile
from baton.errors import Invalid

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""Our name of each architecture that GGUF files can have here. Mistral models are ``llama``."""

FLOAT_TYPES = {"F32": "float32", "F16": "float16"}
GEMMA_27B_LAYERS = 62
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192
"""The scaling of rotary embeddings of all Llama 3 models, but for its factor."""

SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Keys of ``general.sampling`` and their names in generation_config.json."""


def model_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of config.json. Raises Invalid for an architecture that Baton's engine
    does not have, and for a missing key."""
    if file.architecture not in ARCHITECTURES:
        raise Invalid(
            f"{file.path}: general.architecture is {file.architecture!r}; GGUF files are supported "
            f"of {', '.join(ARCHITECTURES)}"
        )
    num_heads = file.require_own("attention.head_count", int)
    hidden = file.require_own("embedding_length", int)
    tensors = file.tensors
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[file.architecture]],
        "model_type": {"qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}.get(
            file.architecture, file.architecture
        ),
        "num_hidden_layers": file.require_own("block_count", int),
        "hidden_size": hidden,
        "intermediate_size": file.require_own("feed_forward_length", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.own("attention.head_count_kv", num_heads),
        "head_dim": file.own("attention.key_length", hidden // num_heads),
        "max_position_embeddings": file.require_own("context_length", int),
        "rms_norm_eps": _shortest(file.require_own("attention.layer_norm_rms_epsilon", float)),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "dtype": _dtype(file),
        "rope_theta": _shortest(file.own("rope.freq_base", 10_000.0)),
    }
    types = {
        tensor.tensor_type.name
        for tensor in tensors.values()
        if len(tensor.shape) > 1 and tensor.name.startswith("blk.")
    }
    of_type = types.pop() if len(types) == 1 else "mixed"
    config["quantization_config"] = {"quant_method": "gguf", "type": of_type}
    config |= _rope_scaling(file)
    config |= {"gemma3": _gemma3, "qwen3moe": _qwen3_moe}.get(file.architecture, _plain)(file)
    return config


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of generation_config.json: EOS tokens, and the model's own sampling
    parameters if the file has any."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = sorted({int(token) for key in keys if (token := file.get(key)) is not None})
    sampling = {name: file.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    given = {
        name: value if isinstance(value, int) else _shortest(value)
        for name, value in sampling.items()
        if value is not None
    }
    return {"eos_token_id": ends, **given, **({"do_sample": True} if given else {})}


def _plain(file: GgufFile) -> dict[str, Any]:
    window = file.own("attention.sliding_window")
    if window is None:
        return {}
    if file.architecture != "llama":
        raise Invalid(f"{file.path}: a sliding window is not supported for {file.architecture}")
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": window,
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    layers = file.require_own("block_count", int)
    scalar = file.own("attention.key_length", 256)
    if layers == GEMMA_27B_LAYERS:
        scalar = file.require_own("embedding_length", int) // file.require_own(
            "attention.head_count", int
        )
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "rope_theta": _shortest(file.own("rope.freq_base", 1e6)),
        "rope_local_base_freq": _shortest(file.own("rope.freq_base_swa", 10_000.0)),
        "sliding_window": file.require_own("attention.sliding_window", int),
    }


def _qwen3_moe(file: GgufFile) -> dict[str, Any]:
    return {
        "num_experts": file.require_own("expert_count", int),
        "num_experts_per_tok": file.require_own("expert_used_count", int),
        "moe_intermediate_size": file.require_own("expert_feed_forward_length", int),
        "norm_topk_prob": True,
    }


def _rope_scaling(file: GgufFile) -> dict[str, Any]:
    """Return ``rope_scaling``, if the model has any. Llama 3's is a tensor of factors in GGUF."""
    if "rope_freqs.weight" in file.tensors:
        return {"rope_scaling": _llama3_scaling(file)}
    kind = file.own("rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise Invalid(
            f"{file.path}: {file.architecture}.rope.scaling.type is {kind!r}; linear and yarn are "
            "supported"
        )
    scaling = {
        "rope_type": kind,
        "factor": _shortest(file.require_own("rope.scaling.factor", float)),
    }
    if (original := file.own("rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def _llama3_scaling(file: GgufFile) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling whose factors the file has. Raises Invalid if its
    factors are others."""
    factors = np.asarray(file.tensors["rope_freqs.weight"].data, dtype=np.float64).reshape(-1)
    factor = float(factors.max())
    theta = float(file.own("rope.freq_base", 10_000.0))
    waves = 2 * math.pi * theta ** (np.arange(len(factors)) / len(factors))
    smooth = (LLAMA3_ORIGINAL / waves - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    expected = 1 / ((1 - smooth.clip(0, 1)) / factor + smooth.clip(0, 1))
    if not np.allclose(factors, expected, rtol=1e-4):
        raise Invalid(
            f"{file.path}: the factors in rope_freqs.weight are not those of Llama 3, which are "
            "the only ones that are supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_ORIGINAL,
    }


def _vocab_size(file: GgufFile) -> int:
    """Return the number of rows of the embedding: a tokenizer may have fewer tokens."""
    if "token_embd.weight" not in file.tensors:
        raise Invalid(f"{file.path}: there is no tensor token_embd.weight")
    return int(file.tensors["token_embd.weight"].shape[-1])


def _dtype(file: GgufFile) -> str:
    """Return the data type of the computation: FP32 or FP16 if all matrices are, else BF16."""
    types = {tensor.tensor_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return FLOAT_TYPES.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"


def _shortest(value: float) -> float:
    """Return the shortest number that is equal in FP32, in which GGUF has it: 1e-05 for
    9.999999747378752e-06."""
    return float(str(np.float32(value)))
