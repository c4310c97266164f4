"""What a layer's attention weighs, keeps and computes."""

from dataclasses import dataclass
from typing import Protocol


class AttentionShape(Protocol):
    """One layer's attention."""

    def parameters(self, hidden: int) -> int: ...

    @property
    def kv_numbers(self) -> int:
        """That one token leaves in the cache."""
        ...

    @property
    def prefill_pair_flops(self) -> int:
        """For one query and one key, in all heads: the product with the key, and the value's."""
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
        """Queries and output, keys and values."""
        return 2 * hidden * self.head_dim * (self.query_heads + self.kv_heads)

    @property
    def kv_numbers(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    @property
    def prefill_pair_flops(self) -> int:
        return 4 * self.query_heads * self.head_dim

    @property
    def decode_pair_flops(self) -> int:
        return self.prefill_pair_flops


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): the cache holds one latent for keys
    and values of all heads, and one rotated key. A prefill expands it to keys and values
    (un-absorbed); a decode step multiplies the queries into its space instead (absorbed), which
    reads less and computes more."""

    query_heads: int
    query_rank: int
    kv_rank: int
    rotated_dim: int
    plain_dim: int
    value_dim: int

    def parameters(self, hidden: int) -> int:
        key_dim = self.plain_dim + self.rotated_dim
        queries = self.query_rank * (hidden + self.query_heads * key_dim)
        keys_values = self.kv_rank * self.query_heads * (self.plain_dim + self.value_dim)
        output = self.query_heads * self.value_dim * hidden
        return queries + hidden * self.kv_numbers + keys_values + output

    @property
    def kv_numbers(self) -> int:
        return self.kv_rank + self.rotated_dim

    @property
    def prefill_pair_flops(self) -> int:
        return 2 * self.query_heads * (self.plain_dim + self.rotated_dim + self.value_dim)

    @property
    def decode_pair_flops(self) -> int:
        return 2 * self.query_heads * (self.kv_numbers + self.kv_rank)
