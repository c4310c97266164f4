"""The variants of a model: what must be equal on two workers for them to serve a request
together."""

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Variant:
    """The weights of a model and the form of its KV on a worker. A model has several variants while
    its weights, its dtype or its codecs are changed worker by worker. Only workers of one variant
    are placed together, share KV, and continue each other's answers without a change of weights.

    ``model_digest`` is hex. ``kv_layout`` is empty on workers of Baton's previous version, which
    don't announce it. ``lossy_codec`` is the lossiest codec that KV may have passed; empty if it is
    exact. ``id`` is a short name, which is equal for equal variants in all processes."""

    model_digest: str = ""
    kv_dtype: str = ""
    block_tokens: int = 0
    kv_layout: str = ""
    lossy_codec: str = ""
    id: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        fields = (
            self.model_digest,
            self.kv_dtype,
            self.block_tokens,
            self.kv_layout,
            self.lossy_codec,
        )
        name = hashlib.blake2b(repr(fields).encode(), digest_size=8).hexdigest()
        object.__setattr__(self, "id", name)

    def __hash__(self) -> int:
        return hash(self.id)
