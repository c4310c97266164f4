"""The numbers of parameters, KV elements and FLOPs of a layer's attention, computed from its
dimensions."""

from dataclasses import dataclass
from typing import Protocol


class AttentionShape(Protocol):
    """The dimensions of one layer's attention, and the sizes and costs that follow from them."""

    @property
    def query_heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    def parameters(self, hidden: int, tensor_size: int = 1) -> int:
        """Return the number of parameters that each of ``tensor_size`` GPUs has of this layer's
        projections. Heads are split between the GPUs (Shoeybi et al., "Megatron-LM", 2019, section
        3). ``tensor_size`` divides ``query_heads``, and divides ``kv_heads`` or is a multiple."""
        ...

    @property
    def kv_elements_per_token(self) -> int:
        """The number of elements that this layer's KV cache stores per token."""
        ...

    def kv_elements_per_gpu(self, tensor_size: int) -> int:
        """Return the number of elements per token that each of ``tensor_size`` GPUs stores."""
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
    (Ainslie et al., 2023). If there are more GPUs than key heads, each GPU has one key head, and
    several have the same one."""

    query_heads: int
    kv_heads: int
    head_dim: int

    def parameters(self, hidden: int, tensor_size: int = 1) -> int:
        """Return the number of parameters in the query, key, value and output projections."""
        query_heads = self.query_heads // tensor_size
        return 2 * hidden * self.head_dim * (query_heads + self._kv_heads_per_gpu(tensor_size))

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    def kv_elements_per_gpu(self, tensor_size: int) -> int:
        return 2 * self._kv_heads_per_gpu(tensor_size) * self.head_dim

    def _kv_heads_per_gpu(self, tensor_size: int) -> int:
        return max(self.kv_heads // tensor_size, 1)

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
    (absorbed), which reads less and computes more. All heads need the whole latent vector, so each
    GPU of a tensor-parallel group stores it, and has the projections to latent vectors."""

    query_heads: int
    query_lora_rank: int
    kv_lora_rank: int
    rope_head_dim: int
    nope_head_dim: int
    value_head_dim: int

    @property
    def kv_heads(self) -> int:
        """The latent vector is like one key head that all query heads share."""
        return 1

    def parameters(self, hidden: int, tensor_size: int = 1) -> int:
        query_heads = self.query_heads // tensor_size
        key_dim = self.nope_head_dim + self.rope_head_dim
        queries = self.query_lora_rank * (hidden + query_heads * key_dim)
        keys_values = self.kv_lora_rank * query_heads * (self.nope_head_dim + self.value_head_dim)
        output = query_heads * self.value_head_dim * hidden
        return queries + hidden * self.kv_elements_per_token + keys_values + output

    @property
    def kv_elements_per_token(self) -> int:
        return self.kv_lora_rank + self.rope_head_dim

    def kv_elements_per_gpu(self, tensor_size: int) -> int:
        return self.kv_elements_per_token

    @property
    def prefill_pair_flops(self) -> int:
        return (
            2 * self.query_heads * (self.nope_head_dim + self.rope_head_dim + self.value_head_dim)
        )

    @property
    def decode_pair_flops(self) -> int:
        return 2 * self.query_heads * (self.kv_elements_per_token + self.kv_lora_rank)
