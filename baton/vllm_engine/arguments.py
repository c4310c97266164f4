"""Builds vLLM's configuration from Baton's settings and vLLM's own arguments."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from baton.engine.runner_options import DEFAULT_POOL_BYTES, RunnerOptions
from baton.errors import Invalid

CPU_BLOCK_TOKENS = 32
"""vLLM's attention on CPUs needs ``block_tokens`` to be a multiple of this number."""


OWN_SETTINGS = {
    "model": "model",
    "max_model_len": "max_model_tokens",
    "max_num_seqs": "max_sequences",
    "max_num_batched_tokens": "max_batched_tokens",
    "block_size": "block_tokens",
    "dtype": "dtype",
    "kv_cache_memory_bytes": "pool_bytes",
    "num_gpu_blocks_override": "num_blocks",
    "served_model_name": "served_model_name",
    "log_level": "log_level",
}
"""vLLM's arguments for which Baton has a setting of its own, each with the name of that setting."""

UNSUPPORTED = {
    "kv_transfer_config": "Baton transfers the KV itself",
    "speculative_config": "speculative decoding with engine vllm is not supported yet",
    "spec_method": "speculative decoding with engine vllm is not supported yet",
    "pipeline_parallel_size": "pipeline parallelism is not supported yet",
    "data_parallel_size": "start more workers instead",
    "enable_lora": "LoRA adapters are not supported yet",
    "decode_context_parallel_size": "context parallelism is not supported yet",
    "runner": "engine vllm generates text only",
    "scheduler_cls": "Baton has a scheduler of its own",
    "worker_cls": "Baton has a worker class of its own",
    "enable_prefix_caching": "Baton has a prefix cache of its own",
    "async_scheduling": "use Baton's setting async_scheduling",
}
"""Arguments of vLLM that are refused, each with the reason for the error message."""

CHANGES_KV = frozenset({
    "attention_backend", "attention_config", "hf_config_path", "hf_overrides", "kernel_config",
    "kv_cache_dtype", "kv_cache_dtype_skip_layers", "linear_backend", "load_format",
    "model_class_overrides", "model_impl", "model_loader_extra_config", "model_weights",
    "moe_backend", "quantization", "quantization_config", "seed",
})  # fmt: skip
"""Arguments that are passed on to vLLM and may change the KV, so they are part of the model's
digest."""

KEEPS_KV = frozenset({
    "additional_config", "allow_deprecated_quantization", "compilation_config", "cpu_offload_gb",
    "cudagraph_capture_sizes", "disable_custom_all_reduce", "distributed_timeout_seconds",
    "download_dir", "enable_expert_parallel", "enforce_eager", "gpu_memory_utilization",
    "ignore_patterns", "max_cudagraph_capture_size", "max_parallel_loading_workers", "numa_bind",
    "numa_bind_cpus", "numa_bind_nodes", "optimization_level", "performance_mode",
    "pt_load_map_location", "safetensors_load_strategy", "tensor_parallel_size",
    "trust_remote_code", "use_tqdm_on_load",
})  # fmt: skip
"""Arguments that are passed on to vLLM and do not change the KV, except for rounding. All arguments
that are neither in this set nor in ``CHANGES_KV`` are refused, because they concern parts of vLLM
that Baton does not use, or might contradict Baton's settings."""


MIN_GPU_MEMORY_UTILIZATION = 0.01
"""vLLM starts only if this share of the device's memory is free. With ``pool_bytes``, it has no
other effect, and several workers may share a device."""


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        raise Invalid(f"engine_args: {message}", param="engine_args")


@dataclass(frozen=True, slots=True)
class VllmArguments:
    """vLLM's configuration. Two configurations with the same ``kv_identity`` compute the same KV
    from the same checkpoint."""

    config: VllmConfig
    kv_identity: str


def read_arguments(path: Path, options: RunnerOptions, arguments: str) -> VllmArguments:
    """Return vLLM's configuration for the model at ``path``. ``arguments`` are command-line
    arguments of ``vllm serve``. Raises Invalid if vLLM does not accept them or Baton does not
    support them."""
    _check_options(options)
    parsed = _parse(arguments)
    ranks = int(parsed.get("tensor_parallel_size", 1))
    if ranks > 1 and not current_platform.is_cpu():
        raise Invalid(
            "engine_args: --tensor-parallel-size must be 1 on a GPU: tensor parallelism on GPUs is "
            "not supported yet",
            param="engine_args",
        )
    values = {**parsed, **_own_values(path, options, ranks)}
    try:
        config = EngineArgs(**values).create_engine_config()
    except Invalid:
        raise
    except Exception as error:  # vLLM and pydantic raise many types for invalid configurations
        raise Invalid(f"vLLM refuses its configuration: {_summary(error)}") from error
    _check_model_runner(config)
    _limit_length(config, options.max_model_tokens)
    _check_generates_text(config)
    return VllmArguments(config, _kv_identity(parsed, config))


def _check_model_runner(config: VllmConfig) -> None:
    """Raise Invalid if vLLM would not use its V1 model runner, whose sampler Baton replaces."""
    try:
        uses_v2 = config.use_v2_model_runner
    except ValueError as error:  # an argument needs V2, which the environment excludes
        raise Invalid(f"engine_args: {_summary(error)}", param="engine_args") from error
    if uses_v2:
        raise Invalid(
            "engine vllm needs vLLM's V1 model runner; set VLLM_USE_V2_MODEL_RUNNER=0 before vLLM "
            "is imported, and leave out arguments that need the V2 model runner",
            param="engine_args",
        )


def _limit_length(config: VllmConfig, max_model_tokens: int | None) -> None:
    """Limit a request's tokens to ``max_model_tokens``, if that is below the model's own limit. A
    higher value has no effect, as with Baton's own engine, although vLLM itself would refuse it.
    vLLM lowers the limit further if a request of that length does not fit in the KV pool."""
    length = config.model_config.max_model_len
    if max_model_tokens is not None and max_model_tokens < length:
        config.model_config.max_model_len = max_model_tokens


def _check_generates_text(config: VllmConfig) -> None:
    model = config.model_config
    if model.runner_type != "generate":
        raise Invalid("pooling models are not supported by engine vllm", param="model")
    if model.is_encoder_decoder:
        raise Invalid("encoder-decoder models are not supported by engine vllm", param="model")


def _kv_identity(parsed: Mapping[str, Any], config: VllmConfig) -> str:
    changes = {name: repr(value) for name, value in parsed.items() if name in CHANGES_KV}
    rope = str(getattr(config.model_config.hf_text_config, "rope_parameters", ""))
    # Models with longrope choose their frequencies by the maximum length.
    length = config.model_config.max_model_len if "longrope" in rope else 0
    known = (config.model_config.dtype, config.model_config.quantization, length)
    return json.dumps([changes, [str(each) for each in known]], sort_keys=True)


def _check_options(options: RunnerOptions) -> None:
    """Raise Invalid if a setting of Baton's own engine is used that has no effect with vLLM."""
    device = "cpu" if current_platform.is_cpu() else "cuda"
    problems = {
        "deterministic": options.deterministic and "is not supported by engine vllm",
        "quantization": options.quantization not in ("auto", "none")
        and _is_argument("--quantization"),
        "kv_dtype": options.kv_dtype != "auto" and _is_argument("--kv-cache-dtype"),
        "cpu_kernels": options.cpu_kernels == "on" and "has no effect with engine vllm",
        "cpu_instruction_set": options.cpu_instruction_set != "auto"
        and "has no effect with engine vllm",
        "device": options.device not in ("auto", device)
        and f"is {options.device}, but vLLM is built for {device}: set auto or {device}",
    }
    for setting, problem in problems.items():
        if problem:
            raise Invalid(f"{setting} {problem}", param=setting)


def _is_argument(flag: str) -> str:
    return f"has no effect with engine vllm: set vLLM's argument {flag} in engine_args instead"


def _parse(arguments: str) -> dict[str, Any]:
    """Return the arguments that differ from vLLM's defaults."""
    parser = EngineArgs.add_cli_args(_Parser(add_help=False))
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise Invalid(f"engine_args: {error}", param="engine_args") from error
    given = vars(parser.parse_args(words))
    defaults = vars(parser.parse_args([]))
    changed = {
        name: value
        for name, value in given.items()
        if name in EngineArgs.__dataclass_fields__ and value != defaults.get(name)
    }
    for name in changed:
        flag = f"--{name.replace('_', '-')}"
        if name in OWN_SETTINGS:
            raise Invalid(
                f"engine_args: {flag} is not allowed: use Baton's setting {OWN_SETTINGS[name]}",
                param="engine_args",
            )
        if name in UNSUPPORTED:
            raise Invalid(
                f"engine_args: {flag} is not allowed: {UNSUPPORTED[name]}", param="engine_args"
            )
        if name not in CHANGES_KV | KEEPS_KV:
            raise Invalid(
                f"engine_args: {flag} can't be used with Baton: leave it out (it concerns a part "
                "of vLLM that Baton replaces, or is not supported yet)",
                param="engine_args",
            )
    return changed


def _own_values(path: Path, options: RunnerOptions, ranks: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model": str(path),
        "tokenizer": str(path),
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "max_model_len": -1,
        "max_num_seqs": min(options.max_sequences, options.max_batched_tokens),
        "max_num_batched_tokens": options.max_batched_tokens,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "disable_hybrid_kv_cache_manager": True,
        "disable_log_stats": True,
        "language_model_only": True,
        "block_size": options.block_tokens,
    }
    if current_platform.is_cpu():
        values["worker_cls"] = "baton.vllm_engine.cpu_worker.BatonCpuWorker"
        values["kv_cache_memory_bytes"] = (options.pool_bytes or DEFAULT_POOL_BYTES) // ranks
        _check_cpu_block(options.block_tokens)
    else:
        values["worker_cls"] = "baton.vllm_engine.gpu_worker.BatonGpuWorker"
        if options.pool_bytes:
            values["kv_cache_memory_bytes"] = options.pool_bytes
            values["gpu_memory_utilization"] = MIN_GPU_MEMORY_UTILIZATION
    if not options.cuda_graphs:
        values["enforce_eager"] = True
    if options.num_blocks:
        values["num_gpu_blocks_override"] = options.num_blocks
    return values


def _check_cpu_block(block_tokens: int) -> None:
    if block_tokens % CPU_BLOCK_TOKENS:
        raise Invalid(
            f"block_tokens is {block_tokens}; vLLM's attention on CPUs needs a multiple of "
            f"{CPU_BLOCK_TOKENS}",
            param="block_tokens",
        )


def _summary(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500] or type(error).__name__
