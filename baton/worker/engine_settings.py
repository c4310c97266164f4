"""Derives the engine's options from the settings."""

from baton.config import Settings
from baton.engine.runner_options import RunnerOptions


def runner_options(settings: Settings) -> RunnerOptions:
    return RunnerOptions(
        device=settings.device,
        dtype=settings.dtype,
        num_blocks=settings.num_blocks,
        pool_bytes=settings.pool_bytes,
        staging_bytes=settings.staging_bytes,
        block_tokens=settings.block_tokens,
        cpu_kernels=settings.cpu_kernels,
        cpu_instruction_set=settings.cpu_instruction_set,
        quantization=settings.quantization,
        kv_dtype=settings.kv_dtype,
        deterministic=settings.deterministic,
        cuda_graphs=settings.cuda_graphs,
        max_model_tokens=settings.max_model_tokens,
        max_sequences=settings.max_sequences,
        max_batched_tokens=settings.max_batched_tokens,
        max_adapters=settings.max_adapters,
        max_lora_rank=settings.max_lora_rank,
    )
