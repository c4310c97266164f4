"""What a number of a KV cache in FP8 stands for."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvScale:
    """Of one layer: a key is kept as its quotient by ``key``, and a value by ``value``. Checkpoints
    may bring them (``self_attn.k_scale``, ``v_scale``); else they are 1."""

    key: float = 1.0
    value: float = 1.0


def kv_scaled_digest(model_digest: bytes, scales: Sequence[KvScale]) -> bytes:
    """16 bytes: a model whose KV is kept so. A checkpoint's digest misses so few numbers."""
    if all(scale == KvScale() for scale in scales):
        return model_digest
    told = ",".join(f"{scale.key.hex()}/{scale.value.hex()}" for scale in scales)
    return hashlib.blake2b(
        model_digest + told.encode(), digest_size=16, person=b"baton.kvscale.v1"
    ).digest()
