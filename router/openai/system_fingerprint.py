"""OpenAI's ``system_fingerprint``. If it changes, the same request with the same seed may get
another answer."""

import hashlib
from functools import lru_cache

from baton.core.member import Member


def system_fingerprint(worker: Member | None) -> str:
    """Return a digest of the model's weights and the KV precision, on which answers depend, or an
    empty string if no worker is known."""
    return "" if worker is None else _fingerprint(worker.model_digest, worker.kv_dtype)


@lru_cache(maxsize=64)
def _fingerprint(model_digest: str, kv_dtype: str) -> str:
    named = f"{model_digest}/{kv_dtype}".encode()
    return f"fp_{hashlib.blake2b(named, digest_size=5).hexdigest()}"
