"""Counts of a worker's LoRA adapters."""

from dataclasses import dataclass


@dataclass(slots=True)
class AdapterStats:
    """Counts of this worker's adapters, for its metrics."""

    num_loads: int = 0
    num_load_failures: int = 0
    num_loaded: int = 0
    size_bytes: int = 0
