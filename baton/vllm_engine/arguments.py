"""Builds vLLM's configuration from Baton's settings and vLLM's own arguments."""

import shlex
from pathlib import Path
from typing import Any, NoReturn

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from baton.engine.runner_options import RunnerOptions
from baton.errors import Invalid

CPU_BLOCK_TOKENS = 32
"""vLLM's attention on CPUs needs blocks of a multiple of this many tokens."""

DEFAULT_POOL_BYTES = 512 * 1024 * 1024

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
}
"""vLLM's arguments that have a setting of Baton's own."""

UNSUPPORTED = {
    "kv_transfer_config": "Baton transfers the KV itself",
    "speculative_config": "speculative decoding with engine vllm is not supported yet",
    "pipeline_parallel_size": "pipeline parallelism is not supported yet",
    "data_parallel_size": "start more workers instead",
    "enable_lora": "LoRA adapters are not supported yet",
    "decode_context_parallel_size": "context parallelism is not supported yet",
    "scheduler_cls": "Baton schedules",
    "worker_cls": "Baton has a worker class of its own",
}
"""vLLM's arguments that would contradict Baton, and why they are refused."""


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        raise Invalid(f"engine_args: {message}", param="engine_args")


def vllm_config(path: Path, options: RunnerOptions, arguments: str) -> VllmConfig:
    """Return vLLM's configuration for the model at ``path``. ``arguments`` are what one would pass
    to ``vllm serve``. Raises Invalid if vLLM does not accept them or Baton can't honour them."""
    _check_options(options)
    parsed = _parse(arguments)
    if parsed.get("tensor_parallel_size", 1) > 1 and not current_platform.is_cpu():
        raise Invalid(
            "engine_args: --tensor-parallel-size: tensor parallelism on GPUs is not supported yet",
            param="engine_args",
        )
    values = {**parsed, **_own_values(path, options)}
    try:
        return EngineArgs(**values).create_engine_config()
    except Invalid:
        raise
    except Exception as error:  # vLLM and pydantic raise many types for invalid configurations
        raise Invalid(f"vLLM refuses its configuration: {_summary(error)}") from error


def _check_options(options: RunnerOptions) -> None:
    """Raise Invalid if a setting of Baton's own engine is set that would not be honoured."""
    device = "cpu" if current_platform.is_cpu() else "cuda"
    problems = {
        "deterministic": options.deterministic and "is not supported by engine vllm",
        "quantization": options.quantization != "none" and _is_argument("--quantization"),
        "kv_dtype": options.kv_dtype != "auto" and _is_argument("--kv-cache-dtype"),
        "cpu_kernels": options.cpu_kernels == "on" and "has no effect with engine vllm",
        "device": not options.device.startswith(("auto", device))
        and f"is {options.device}, but this vLLM is built for {device}",
    }
    for setting, problem in problems.items():
        if problem:
            raise Invalid(f"{setting} {problem}", param=setting)


def _is_argument(flag: str) -> str:
    return f"is one of vLLM's own arguments with engine vllm: set {flag} in engine_args"


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
        if name in EngineArgs.__dataclass_fields__ and value != defaults[name]
    }
    for name in changed:
        flag = f"--{name.replace('_', '-')}"
        if name in OWN_SETTINGS:
            raise Invalid(
                f"engine_args: {flag} is the setting {OWN_SETTINGS[name]} in Baton; set that",
                param="engine_args",
            )
        if name in UNSUPPORTED:
            raise Invalid(f"engine_args: {flag}: {UNSUPPORTED[name]}", param="engine_args")
    return changed


def _own_values(path: Path, options: RunnerOptions) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model": str(path),
        "tokenizer": str(path),
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "max_model_len": options.max_model_tokens or -1,
        "max_num_seqs": options.max_sequences,
        "max_num_batched_tokens": options.max_batched_tokens,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "disable_hybrid_kv_cache_manager": True,
        "disable_log_stats": True,
        "block_size": options.block_tokens,
    }
    if current_platform.is_cpu():
        values["worker_cls"] = "baton.vllm_engine.cpu_worker.BatonCpuWorker"
        values["kv_cache_memory_bytes"] = options.pool_bytes or DEFAULT_POOL_BYTES
        _check_cpu_block(options.block_tokens)
    else:
        values["worker_cls"] = "baton.vllm_engine.gpu_worker.BatonGpuWorker"
        if options.pool_bytes:
            values["kv_cache_memory_bytes"] = options.pool_bytes
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
