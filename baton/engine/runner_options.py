"""Options of a model runner."""

from dataclasses import dataclass

DEFAULT_POOL_BYTES = 512 * 1024 * 1024
"""Size of the KV pool on a CPU, if no setting specifies it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """How a model is loaded and run. ``num_blocks`` takes precedence over ``pool_bytes``, and
    counts blocks with the KV of all layers. If both are None, the pool has a default size, which on
    a GPU is a share of its free memory. ``staging_bytes`` is the size of the pool's staging area;
    None means a size that depends on the pool's.

    ``cpu_kernels`` is a name in ``baton.engine.native.backend_choice.CPU_KERNEL_MODES``,
    ``cpu_instruction_set`` one in ``baton.engine.native.processor`` or "auto",
    ``quantization`` one in ``baton.engine.quantization.QUANTIZATION_FORMATS`` or "auto",
    ``kv_dtype`` one in ``baton.engine.runner.KV_DTYPES``. ``max_model_tokens`` limits the length
    of a request; None means the model's own limit. ``max_sequences`` and ``max_batched_tokens``
    limit a step. ``max_adapters`` LoRA adapters may be loaded at once, each of rank
    ``max_lora_rank`` at most."""

    device: str = "auto"
    dtype: str = "auto"
    num_blocks: int | None = None
    pool_bytes: int | None = None
    staging_bytes: int | None = 0
    block_tokens: int = 16
    cpu_kernels: str = "auto"
    cpu_instruction_set: str = "auto"
    quantization: str = "none"
    kv_dtype: str = "auto"
    deterministic: bool = False
    cuda_graphs: bool = True
    max_model_tokens: int | None = None
    max_sequences: int = 64
    max_batched_tokens: int = 512
    max_adapters: int = 16
    max_lora_rank: int = 64
