"""The share of a model and of its work that one GPU of a worker has."""

from dataclasses import dataclass

from simulator.model_shapes import KV_BYTES, ModelShape
from simulator.parallelism import ONE_GPU, Parallelism


@dataclass(frozen=True, slots=True)
class GpuShare:
    """What each GPU of a worker stores and computes. ``common_bytes`` of weights are read in every
    step, ``expert_bytes`` as far as tokens choose these experts; ``weight_bytes`` are both and the
    input embedding. The other fields are means per token of the worker: the FLOPs of its matrix
    products, the FLOPs of attention for each pair of a query and a key token in a prefill and in a
    decode step, and the bytes of KV of each token of context. Each GPU has ``kv_bytes_per_token``
    for each token of its own requests, which are those of one of ``num_replicas`` groups."""

    common_bytes: float
    expert_bytes: float
    weight_bytes: int
    token_flops: float
    prefill_pair_flops: float
    decode_pair_flops: float
    kv_bytes_per_token: int
    num_replicas: int

    @property
    def kv_read_bytes(self) -> float:
        return self.kv_bytes_per_token / self.num_replicas

    @classmethod
    def of(cls, shape: ModelShape, parallelism: Parallelism = ONE_GPU) -> "GpuShare":
        """Return a GPU's share. ``parallelism`` must fit the model. Tokens and experts are assumed
        to be spread evenly over the GPUs."""
        tensor, gpus, size = parallelism.tensor, parallelism.num_gpus, shape.bytes_per_weight
        common = shape.common_parameters_per_gpu(tensor)
        experts = shape.expert_parameters // gpus
        chosen = shape.active_parameters - shape.common_parameters
        embedding = shape.embedding_parameters_per_gpu(tensor)
        attention = shape.attention
        return cls(
            common_bytes=common * size,
            expert_bytes=experts * size,
            weight_bytes=round((embedding + common + experts) * size),
            token_flops=2 * (common / parallelism.num_replicas + chosen / gpus),
            prefill_pair_flops=shape.layers * attention.prefill_pair_flops / gpus,
            decode_pair_flops=shape.layers * attention.decode_pair_flops / gpus,
            kv_bytes_per_token=KV_BYTES * shape.layers * attention.kv_elements_per_gpu(tensor),
            num_replicas=parallelism.num_replicas,
        )
