"""The scales of a KV cache in FP8."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvScale:
    """The scales of one layer: keys are divided by ``key`` before they are stored, and values by
    ``value``. Checkpoints may contain the scales (``self_attn.k_scale``, ``v_scale``); otherwise
    they are 1.
    """

    key: float = 1.0
    value: float = 1.0


def kv_scaled_digest(model_digest: bytes, scales: Sequence[KvScale]) -> bytes:
    """Return a digest (16 bytes) of the model and its KV scales, which ``model_digest`` does not
    cover. It is ``model_digest`` itself if every scale is 1."""
    if all(scale == KvScale() for scale in scales):
        return model_digest
    text = ",".join(f"{scale.key.hex()}/{scale.value.hex()}" for scale in scales)
    return hashlib.blake2b(
        model_digest + text.encode(), digest_size=16, person=b"baton.kvscale.v1"
    ).digest()
