"""OpenAI's ``system_fingerprint``. If it changes, the same request with the same seed may get
another answer."""

import hashlib
from functools import lru_cache

from baton.core.variant import Variant


@lru_cache(maxsize=64)
def system_fingerprint(variant: Variant | None) -> str:
    """Return a digest of the model's weights and the KV precision, on which answers depend, or an
    empty string if no worker is known."""
    if variant is None:
        return ""
    named = f"{variant.model_digest}/{variant.kv_dtype}".encode()
    return f"fp_{hashlib.blake2b(named, digest_size=5).hexdigest()}"
