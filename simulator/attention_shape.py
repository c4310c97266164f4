"""The numbers of parameters, KV elements and FLOPs of a layer's attention, computed from its
dimensions."""

from dataclasses import dataclass
from typing import Protocol


class AttentionShape(Protocol):
    """The dimensions of one layer's attention, and the sizes and costs that follow from them."""

    def parameters(self, hidden: int) -> int: ...

    @property
    def kv_elements_per_token(self) -> int:
        """The number of elements that this layer's KV cache stores per token."""
        ...

    @property
    def prefill_pair_flops(self) -> int:
        """The FLOPs that a prefill takes for each pair of a query token and a key token, over all
        heads of this layer. Two products are counted: query times key, and attention weight times
        value."""
        ...

    @property
    def decode_pair_flops(self) -> int: ...


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Grouped-query attention, in which several query heads share one key head and one value head
    (Ainslie et al., 2023)."""

    query_heads: int
    kv_heads: int
    head_dim: int

    def parameters(self, hidden: int) -> int:
        """Return the number of parameters in the query, key, value and output projections."""
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
