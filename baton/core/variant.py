"""The variants of a model: what must be equal on two workers for them to serve a request
together."""

import hashlib
from dataclasses import astuple, dataclass
from functools import lru_cache

MAX_CACHED_IDS = 1024
"""Maximum number of variants whose ids are remembered. A model has two while new weights are rolled
out."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The weights of a model and the form of its KV on a worker. A model has several variants while
    its weights, its dtype or its codecs are changed worker by worker. Only workers of one variant
    are placed together, share KV, and continue each other's answers without a change of weights.

    ``model_digest`` is hex. ``kv_layout`` is empty on workers of Baton's previous version, which
    don't announce it. ``lossy_codec`` is the lossiest codec that KV may have passed; empty if it is
    exact."""

    model_digest: str = ""
    kv_dtype: str = ""
    block_tokens: int = 0
    kv_layout: str = ""
    lossy_codec: str = ""

    @property
    def id(self) -> str:
        """A short name, which is equal for equal variants in all processes."""
        return _variant_id(self)


@lru_cache(MAX_CACHED_IDS)
def _variant_id(variant: Variant) -> str:
    return hashlib.blake2b(repr(astuple(variant)).encode(), digest_size=8).hexdigest()
