"""The parameters, KV cache size and FLOPs of a layer's attention."""

from dataclasses import dataclass
from typing import Protocol


class AttentionShape(Protocol):
    """The attention of one layer."""

    def parameters(self, hidden: int) -> int: ...

    @property
    def kv_elements_per_token(self) -> int:
        """How many numbers this layer's KV cache stores for each token."""
        ...

    @property
    def prefill_pair_flops(self) -> int:
        """The FLOPs of a prefill for each pair of a query token and a key token: for the
        products of query and key, and of attention weight and value, over this layer's heads."""
        ...

    @property
    def decode_pair_flops(self) -> int: ...


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Query heads in groups that share a key and a value (Ainslie et al., 2023)."""

    query_heads: int
    kv_heads: int
    head_dim: int

    def parameters(self, hidden: int) -> int:
        """Parameters of the query, output, key and value projections."""
        return 2 * hidden * self.head_dim * (self.query_heads + self.kv_heads)

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    @property
    def prefill_pair_flops(self) -> int:
        return 4 * self.query_heads * self.head_dim

    @property
    def decode_pair_flops(self) -> int:
        return self.prefill_pair_flops


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): the cache has one latent vector for
    the keys and values of all heads, and one RoPE key. A prefill expands the latent vector to keys
    and values (un-absorbed); a decode step instead projects the queries into the latent space
    (absorbed), which reads less and computes more."""

    query_heads: int
    query_lora_rank: int
    kv_lora_rank: int
    rope_head_dim: int
    nope_head_dim: int
    value_head_dim: int

    def parameters(self, hidden: int) -> int:
        key_dim = self.nope_head_dim + self.rope_head_dim
        queries = self.query_lora_rank * (hidden + self.query_heads * key_dim)
        keys_values = (
            self.kv_lora_rank * self.query_heads * (self.nope_head_dim + self.value_head_dim)
        )
        output = self.query_heads * self.value_head_dim * hidden
        return queries + hidden * self.kv_elements_per_token + keys_values + output

    @property
    def kv_elements_per_token(self) -> int:
        return self.kv_lora_rank + self.rope_head_dim

    @property
    def prefill_pair_flops(self) -> int:
        return (
            2 * self.query_heads * (self.nope_head_dim + self.rope_head_dim + self.value_head_dim)
        )

    @property
    def decode_pair_flops(self) -> int:
        return 2 * self.query_heads * (self.kv_elements_per_token + self.kv_lora_rank)
