"""Chooses whether a model runs on our CPU kernels or on torch, and says why."""

import functools
from dataclasses import dataclass, replace

import torch

from baton.checkpoints.checkpoint import ModelConfig
from baton.engine.native import library
from baton.engine.native.matrix import can_pack
from baton.engine.native.processor import best_instruction_set, missing_features
from baton.engine.quantization import INT4_BLOCK_TYPES, resolve_quantization
from baton.errors import Invalid, Unavailable
from baton.system.portability import describe_facilities, uses_linux

CPU_KERNEL_MODES = ("auto", "on", "off")


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend of a model. ``description`` is a human-readable text that says which backend it
    is and why it was chosen. ``is_fallback`` is set if the kernels would have been preferred but
    can't be used."""

    is_native: bool
    description: str
    is_fallback: bool = False


TORCH_BACKEND = BackendChoice(False, "torch")


def choose_backend(
    mode: str,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str = "none",
    kv_dtype: torch.dtype | None = None,
) -> BackendChoice:
    """Choose a model's backend. ``kv_dtype`` is the KV pool's dtype (default: ``dtype``). Raises
    Invalid if ``mode`` is "on" and the kernels can't be used, or if ``mode`` is not in
    ``CPU_KERNEL_MODES``."""
    if mode not in CPU_KERNEL_MODES:
        raise Invalid(
            f"cpu_kernels is {mode!r}, and must be one of {', '.join(CPU_KERNEL_MODES)}",
            param="cpu_kernels",
        )
    if mode == "auto" and device.type != "cpu":
        weights = "" if quantization == "none" else f"; weights in {quantization}"
        return replace(TORCH_BACKEND, description=f"torch and Triton, in {_name(dtype)}{weights}")
    if mode == "off":
        return replace(
            TORCH_BACKEND, description=TORCH_BACKEND.description + _decoded(quantization)
        )
    reason = unsupported_reason(config, device, dtype, quantization, kv_dtype)
    if reason is None:
        weights = "" if quantization == "none" else f", weights in {quantization}"
        return BackendChoice(
            True, f"our own kernels ({best_instruction_set()}), in {_name(dtype)}{weights}"
        )
    if mode == "on":
        raise Invalid(f"cpu_kernels is on, but {reason}", param="cpu_kernels")
    return BackendChoice(False, f"torch: {reason}{_decoded(quantization)}", is_fallback=True)


def choose_quantization(
    setting: str,
    mode: str,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> str:
    """Return the format that weights are stored in. With ``auto``, 4-bit weights of a checkpoint
    stay as they are where the kernels multiply them (``mode`` is their setting); but not with AMX,
    whose tiles multiply only decoded weights. Raises Invalid if setting, checkpoint and device
    conflict."""
    if setting != "auto":
        return resolve_quantization(setting, config, device)
    stays = (
        config.gguf_type in INT4_BLOCK_TYPES
        and mode != "off"
        and unsupported_reason(config, device, dtype, "int4", kv_dtype) is None
        and best_instruction_set() != "amx"
    )
    return "int4" if stays else resolve_quantization("none", config, device)


def unsupported_reason(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str = "none",
    kv_dtype: torch.dtype | None = None,
) -> str | None:
    """Return why the kernels can't run a model, or None if they can."""
    if device.type != "cpu":
        return f"the device is {device}"
    if dtype not in library.DTYPE_CODES:
        return f"the kernels don't compute in {_name(dtype)}"
    if quantization not in library.QUANTIZATION_CODES:
        return f"the kernels don't store weights in {quantization}"
    if kv_dtype not in (None, dtype):
        return "the kernels don't store KV in fp8"
    if config.head_dim % 2 or not all(
        can_pack(dtype, size, quantization) for size in _depths(config)
    ):
        wanted = _name(dtype) if quantization == "none" else quantization
        return f"the kernels for {wanted} need even matrix sizes, and the model has odd ones"
    return unavailable_reason()


def unavailable_reason() -> str | None:
    """Return why the kernels can't run on this machine, or None if they can. Compile them if
    needed."""
    if not uses_linux():
        return f"this process uses {describe_facilities()}"
    best = best_instruction_set()
    return (
        f"the processor lacks {', '.join(missing_features())}"
        if best is None
        else _not_loaded(best)
    )


@functools.cache
def _not_loaded(wanted: str) -> str | None:
    try:
        library.load_for(wanted)
    except (Unavailable, OSError) as error:
        return str(error)
    return None


def _depths(config: ModelConfig) -> list[int]:
    """Return the depths (input sizes) of the model's matrix products."""
    depths = [config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size]
    return depths if config.moe is None else [*depths, config.moe.intermediate_size]


def _decoded(quantization: str) -> str:
    return (
        ""
        if quantization == "none"
        else f"; weights in {quantization} are decoded for each product"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
