"""Reads the configuration in a Hugging Face model directory, and computes the model's digest.

This module doesn't import torch, because the router and the conductor use it, too.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.checkpoints.decoder_traits import (
    DEFAULTS,
    LLAMA_TRAITS,
    DecoderTraits,
    MoeConfig,
    has_attention_bias,
    load_moe,
    load_traits,
)
from baton.checkpoints.json_file import JsonFile
from baton.checkpoints.rope_config import RopeConfig, load_rope, max_position
from baton.errors import Invalid

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MistralForCausalLM": "mistral",
    "Gemma3ForCausalLM": "gemma3",
    "GptOssForCausalLM": "gpt_oss",
}
DEMO_MODEL = Path(__file__).parents[1] / "models" / "demo"
DTYPES = ("float32", "bfloat16", "float16")
MIN_SCALE_BLOCK = 16
"""The sides of a block that shares a scale must be multiples of this, because the kernels multiply
this many inputs at once."""

GGUF_WEIGHTS = "model.gguf"
GGUF_INDEX = "model.gguf.json"
"""The weights of a model that comes as a GGUF file, and the list of its tensors
(:mod:`baton.checkpoints.gguf`)."""

SAMPLES_PER_SHARD = 16
SAMPLE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """The format in which a checkpoint stores matrices in FP8 (E4M3). ``block`` is the shape
    ``(num_outputs, num_inputs)`` of the blocks that have one scale each; None means one scale per
    output, or one for the whole matrix."""

    block: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The settings in config.json and generation_config.json that the engine needs. Sizes are in
    elements."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    moe: MoeConfig | None
    dtype: str
    eos_token_ids: tuple[int, ...]
    fp8: Fp8Format | None = None
    gguf_type: str = ""
    """For a GGUF file, the type of all matrices of its layers, or "mixed"; otherwise empty."""

    traits: DecoderTraits = LLAMA_TRAITS

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """A model's vocabulary size, maximum length in tokens, and EOS tokens. Unlike
    :class:`ModelConfig`, it can be loaded for models of any architecture. ``kv_window_tokens`` is
    set by an engine that frees the KV of tokens before a window of this length in
    ``num_windowed_groups`` groups of layers, but not in ``num_full_groups`` others."""

    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    kv_window_tokens: int | None = None
    num_full_groups: int = 0
    num_windowed_groups: int = 1


def load_model_config(path: Path) -> ModelConfig:
    """Load the model's configuration. Raises Invalid, naming the file and the key, if a value is
    missing, wrong or not supported."""
    raw = JsonFile(path / "config.json")
    architecture = _architecture(raw)
    raw = raw.with_defaults(DEFAULTS.get(architecture, {}))
    num_heads = raw.positive_int("num_attention_heads")
    hidden_size = raw.positive_int("hidden_size")
    num_layers = raw.positive_int("num_hidden_layers")
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=raw.positive_int("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=raw.positive_int("num_key_value_heads", num_heads),
        head_dim=raw.positive_int("head_dim", hidden_size // num_heads),
        vocab_size=raw.positive_int("vocab_size"),
        max_position_embeddings=max_position(raw),
        rms_norm_eps=raw.positive_float("rms_norm_eps", 1e-6),
        rope=load_rope(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=has_attention_bias(raw, architecture),
        qk_norm=architecture in ("qwen3", "qwen3_moe", "gemma3"),
        moe=load_moe(raw, architecture, num_layers),
        dtype=_dtype(raw),
        eos_token_ids=_eos_token_ids(raw, path),
        fp8=_fp8(raw, architecture),
        gguf_type=_gguf_type(raw),
        traits=load_traits(raw, architecture, num_layers),
    )


def load_model_limits(path: Path) -> ModelLimits:
    """Load the limits of a model of any architecture. For a multimodal model, load the limits of
    its language model. Raises Invalid, naming the file and the key, if a value is missing or
    wrong."""
    raw = JsonFile(path / "config.json")
    text = raw.part("text_config")
    return ModelLimits(
        text.positive_int("vocab_size"),
        max_position(text),
        _eos_token_ids(raw, path) or _eos_token_ids(text, path),
    )


def list_shards(path: Path) -> list[Path]:
    """Return the files with the model's weights, ordered by name. Raises Invalid if one is
    missing."""
    shards = shard_paths(path)
    for shard in shards:
        if not shard.is_file():
            raise Invalid(
                f"{shard.resolve()}: the file is missing (weights must be in safetensors format, "
                "or in a GGUF file that model names)"
            )
    return shards


def is_gguf(path: Path) -> bool:
    """Return whether a folder describes a GGUF file."""
    return (path / GGUF_INDEX).is_file()


def shard_paths(path: Path) -> list[Path]:
    """Return where the files with the model's weights must be, ordered by name: safetensors, or a
    GGUF file. Raises Invalid for a wrong index of them."""
    if is_gguf(path):
        return [path / GGUF_WEIGHTS]
    index_path = path / "model.safetensors.index.json"
    if index_path.exists():
        weight_map = JsonFile(index_path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise Invalid(f"{index_path}: weight_map is missing, or is not an object")
        return [path / name for name in sorted(set(weight_map.values()))]
    return [path / "model.safetensors"]


def read_shard_header(shard: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the offset of its data. Raises Invalid when
    the file is malformed, or shorter than the header says."""
    size = shard.stat().st_size
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, 100_000_000):
            raise Invalid(
                f"{shard}: the file is not in safetensors format, or is truncated in its header"
            )
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            entries = [entry for key, entry in header.items() if key != "__metadata__"]
            ends = [_tensor_end(entry) for entry in entries]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise Invalid(f"{shard}: invalid safetensors header: {error}") from error
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise Invalid(f"{shard}: the file is truncated: it has {size} of {expected} bytes")
    return header, 8 + length


def _tensor_end(entry: dict[str, Any]) -> int:
    """Return the offset of a tensor's end in the data, in bytes. Raises ValueError, KeyError, or
    TypeError for a malformed entry."""
    start, end = entry["data_offsets"]
    numbers = [start, end, *entry["shape"]]
    if not isinstance(entry["dtype"], str) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{entry} does not describe a tensor")
    return int(end)


def model_digest(path: Path) -> bytes:
    """Return a digest of 16 bytes that identifies config and weights for all practical purposes. It
    covers config.json and each shard's name, size, header, and 16 evenly spaced samples of 64
    KiB."""
    digest = hashlib.blake2b(digest_size=16, person=b"baton.model.v1")
    digest.update((path / "config.json").read_bytes())
    for shard in list_shards(path):
        start = 0 if shard.name == GGUF_WEIGHTS else read_shard_header(shard)[1]
        digest.update(f"{shard.name}:{shard.stat().st_size}:".encode())
        with shard.open("rb") as file:
            digest.update(file.read(start))
        for sample in file_samples(shard, start):
            digest.update(sample)
    return digest.digest()


def file_samples(path: Path, start: int = 0) -> Iterator[bytes]:
    """Yield evenly spaced samples of a file, from the byte ``start`` on."""
    size = path.stat().st_size
    step = max(1, (size - start) // SAMPLES_PER_SHARD)
    with path.open("rb") as file:
        for offset in range(start, size, step):
            file.seek(offset)
            yield file.read(min(SAMPLE_BYTES, step))


def _architecture(raw: JsonFile) -> str:
    names = raw.get("architectures", [])
    for name in names if isinstance(names, list) else []:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise Invalid(
        f"{raw.path}: architectures is {names!r}; supported architectures: "
        f"{', '.join(ARCHITECTURES)}"
    )


def _fp8(raw: JsonFile, architecture: str) -> Fp8Format | None:
    """Parse ``quantization_config`` as transformers (``fp8``) and llm-compressor
    (``compressed-tensors``) write it for FP8. Return None if the checkpoint is not quantized,
    or in MXFP4, which is decoded when gpt-oss is loaded. Raises Invalid for any other format. The
    settings for activations are ignored: the engine
    decides how to quantize activations."""
    config = raw.get("quantization_config")
    if config is None or (architecture == "gpt_oss" and _is_mxfp4(config)) or _gguf_type(raw):
        return None
    try:
        return _FP8_METHODS[config["quant_method"]](config)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Invalid(
            f"{raw.path}: quantization_config is {json.dumps(config)[:200]}; only FP8 (E4M3) "
            "with quant_method fp8 or compressed-tensors is supported, with one scale per "
            f"matrix, output, or block whose sides are multiples of {MIN_SCALE_BLOCK}"
        ) from error


def _gguf_type(raw: JsonFile) -> str:
    """Return the type of a GGUF file's layers, as the folder that describes it says; empty for
    another checkpoint."""
    config = raw.get("quantization_config")
    is_gguf = isinstance(config, dict) and config.get("quant_method") == "gguf"
    return str(config.get("type", "")) if is_gguf else ""


def _is_mxfp4(config: Any) -> bool:
    return isinstance(config, dict) and config.get("quant_method") == "mxfp4"


def _huggingface_fp8(config: dict[str, Any]) -> Fp8Format:
    """Parse transformers' format. Raises ValueError or TypeError for any other format."""
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(config["fmt"])
    return Fp8Format(_block(config.get("weight_block_size")))


def _compressed_tensors(config: dict[str, Any]) -> Fp8Format:
    """Parse llm-compressor's format, which must have exactly one group of layers. Whether this
    group contains all linear layers except the ignored ones is not checked."""
    (group,) = config["config_groups"].values()
    weights = group["weights"]
    kind = (weights["num_bits"], weights["type"], weights["symmetric"])
    if config["format"] != "float-quantized" or kind != (8, "float", True):
        raise ValueError(kind)
    if weights["strategy"] not in ("tensor", "channel", "block"):
        raise ValueError(weights["strategy"])
    return Fp8Format(_block(weights.get("block_structure")))


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    outputs, inputs = value
    if any(
        type(size) is not int or size < 1 or size % MIN_SCALE_BLOCK for size in (outputs, inputs)
    ):
        raise ValueError(value)
    return outputs, inputs


_FP8_METHODS = {"fp8": _huggingface_fp8, "compressed-tensors": _compressed_tensors}


def _dtype(raw: JsonFile) -> str:
    name = str(raw.get("dtype", raw.get("torch_dtype", "float32"))).removeprefix("torch.")
    if name not in DTYPES:
        raise Invalid(f"{raw.path}: dtype is {name!r}; supported dtypes: {', '.join(DTYPES)}")
    return name


def _eos_token_ids(raw: JsonFile, path: Path) -> tuple[int, ...]:
    """Return the ids of the EOS tokens. generation_config.json takes precedence over config.json,
    as in transformers."""
    generation = path / "generation_config.json"
    value = JsonFile(generation).get("eos_token_id") if generation.exists() else None
    if value is None:
        value = raw.get("eos_token_id", [])
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in values):
        raise Invalid(f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return tuple(values)
