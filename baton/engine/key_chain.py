"""The chain of block keys of one sequence, computed once and extended as it grows."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.attention_window import AttentionWindow
from baton.core.block_key import KeyRoot, block_keys, grouped_keys
from baton.core.ids import BlockKey, TokenId
from baton.core.request import RequestSpec


class BlockKeyChain:
    """The keys of the full blocks of a token sequence that only grows. If layers are divided into
    groups, each ``block_tokens`` tokens have ``num_groups`` blocks."""

    __slots__ = ("_block_tokens", "_num_groups", "keys", "root")

    def __init__(self, root: BlockKey, block_tokens: int, num_groups: int = 1) -> None:
        self.root = root
        self._block_tokens = block_tokens
        self._num_groups = num_groups
        self.keys: list[BlockKey] = []

    def extend(self, token_ids: Sequence[TokenId]) -> None:
        """Add the keys of the blocks filled since the last call. ``token_ids`` is the whole
        sequence."""
        size, num_groups = self._block_tokens, self._num_groups
        start = len(self.keys) // num_groups * size
        if len(token_ids) - start >= size:
            last = self.keys[-num_groups] if self.keys else self.root
            self.keys += grouped_keys(block_keys(last, token_ids[start:], size), num_groups)


@dataclass(frozen=True, slots=True)
class BlockKeyChainFactory:
    """Makes the key chains of an engine's requests. It may be used in any thread, so that prompts
    are hashed outside of the engine's thread: hashing 128k tokens takes 15 ms, and no step should
    wait that long. ``lossy_codec`` is the name of the worker's lossiest KV codec, empty if none is
    lossy: it is part of the keys of all requests that don't want exact KV."""

    model_digest: bytes
    kv_dtype: str
    block_tokens: int
    num_groups: int = 1
    lossy_codec: str = ""

    def root_key(
        self,
        tenant_salt: bytes,
        adapter_digest: bytes = b"",
        attention_window: AttentionWindow | None = None,
        *,
        exact_kv: bool = False,
    ) -> BlockKey:
        """Return the root key of a tenant's key chains for the base model or an adapter, with or
        without an attention window. ``exact_kv``: for requests whose KV must not pass a lossy
        codec."""
        root = KeyRoot(
            self.model_digest,
            self.kv_dtype,
            self.block_tokens,
            adapter_digest.hex(),
            tenant_salt,
            "" if exact_kv else self.lossy_codec,
            "" if attention_window is None else attention_window.key_text,
        )
        return root.key()

    def root_key_of(self, spec: RequestSpec) -> BlockKey:
        """Return the root key of a request's key chain."""
        return self.root_key(
            spec.tenant_salt,
            spec.adapter_digest,
            spec.attention_window,
            exact_kv=spec.exact_kv,
        )

    def make_chain(self, spec: RequestSpec) -> BlockKeyChain:
        """Return the key chain of ``spec.token_ids``."""
        chain = BlockKeyChain(
            self.root_key_of(spec),
            self.block_tokens,
            self.num_groups,
        )
        chain.extend(spec.token_ids)
        return chain
