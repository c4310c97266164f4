"""Computes the costs of prefill and decode from a GPU's datasheet.

In the roofline model (Williams et al., CACM 2009), the slower of computing and reading memory
determines the time. A prefill is compute-bound; a decode step is memory-bound.
"""

import math
from dataclasses import dataclass

from baton.core.cost import DecodeCost, PrefillCost
from baton.errors import Invalid
from simulator.gpu_link import CollectiveCost
from simulator.hardware import GIB, Gpu
from simulator.model_shapes import KV_BYTES, ModelShape
from simulator.parallelism import ONE_GPU, Parallelism
from simulator.step_cost import StepCost, WorkerCosts

ACTIVATION_BYTES = 2
"""Bytes per element of the hidden states that are sent: BF16."""


@dataclass(frozen=True, slots=True)
class CommunicationCost:
    """The time of a step's communication: ``fixed_seconds``, and ``per_token_seconds`` for each
    token that the worker computes. Nothing else runs meanwhile."""

    fixed_seconds: float = 0.0
    per_token_seconds: float = 0.0

    def __add__(self, other: "CommunicationCost") -> "CommunicationCost":
        return CommunicationCost(
            self.fixed_seconds + other.fixed_seconds,
            self.per_token_seconds + other.per_token_seconds,
        )


NO_COMMUNICATION = CommunicationCost()


def communication_cost(gpu: Gpu, shape: ModelShape, parallelism: Parallelism) -> CommunicationCost:
    """Return the cost of a step's communication, over the link of the group.

    In each layer, tensor parallelism takes an all-reduce of the hidden states,
    ``[num_tokens, hidden]``, after attention and another one after the feed-forward part
    (Megatron-LM, section 3). Expert parallelism takes, instead of the second one of a layer with
    experts, an all-to-all that sends each token to the GPUs with its experts, and another one that
    sends the results back (GShard, section 3.2). The input embedding and the logits are left
    out: they take as much as a small part of a layer."""
    return _all_reduces(gpu, shape, parallelism) + _all_to_alls(gpu, shape, parallelism)


def _all_reduces(gpu: Gpu, shape: ModelShape, parallelism: Parallelism) -> CommunicationCost:
    """Each tensor-parallel group reduces the hidden states of its own tokens, at the same time as
    the others."""
    group = gpu.link_of_group(parallelism.num_gpus).all_reduce(parallelism.tensor)
    count = 2 * shape.layers
    if parallelism.expert > 1:
        count -= shape.expert_layers
    per_token = shape.hidden_size * ACTIVATION_BYTES / parallelism.num_replicas
    return _repeated(group, count, per_token)


def _all_to_alls(gpu: Gpu, shape: ModelShape, parallelism: Parallelism) -> CommunicationCost:
    """Each GPU sends its share of the tokens. A token is sent once to each GPU that has experts
    that it chooses, apart from its own; experts are assumed to be chosen at random. So of the
    ``expert`` GPUs, a token's ``per_token`` experts lie on
    ``expert * (1 - (1 - 1 / expert) ** per_token)``."""
    size = parallelism.expert
    if shape.experts is None or size == 1:
        return NO_COMMUNICATION
    missed = (1 - 1 / size) ** shape.experts.per_token
    per_token = (size - 1) * (1 - missed) * shape.hidden_size * ACTIVATION_BYTES / size
    group = gpu.link_of_group(size).all_to_all(size)
    return _repeated(group, 2 * shape.expert_layers, per_token)


def _repeated(cost: CollectiveCost, count: int, bytes_per_token: float) -> CommunicationCost:
    return CommunicationCost(
        count * cost.fixed_seconds, count * cost.per_byte_seconds * bytes_per_token
    )


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


RESERVED_MEMORY_SHARE = 0.1
"""Share of the memory that is available for neither weights nor KV, but for activations, buffers
and the runtime."""

STEP_OVERHEAD_SECONDS = 0.5e-3
"""Time of a step that neither products nor attention take: sampling, small kernels, and what the
host does not hide. Baton's steps on an H100 and vLLM's on an RTX 4090 have about as much."""

MAX_TENSOR_POWER = 5
"""The largest tensor-parallel size that an error recommends is two to this power."""


def roofline(
    gpu: Gpu,
    shape: ModelShape,
    num_gpus: int = 1,
    prefill_efficiency: float | None = None,
    decode_efficiency: float | None = None,
) -> WorkerCosts:
    """Compute the costs of a worker of ``num_gpus`` GPUs that share work and memory evenly and
    communicate in no time; this is the limit that no parallelism exceeds. ``prefill_efficiency`` is
    the share of peak FLOPS that matrix products reach, ``decode_efficiency`` the share of memory
    bandwidth that reads reach; if None, they are the GPU's.

    FP8 weights are assumed to compute at the speed of BF16. Raises Invalid for a model that does
    not fit, and for arguments out of range."""
    if num_gpus < 1:
        raise Invalid(f"a worker has {num_gpus} GPUs; it must have at least one", param="num_gpus")
    rates = _Rates.of(gpu, num_gpus, prefill_efficiency, decode_efficiency)
    capacity = _kv_capacity_tokens(gpu, shape, num_gpus)
    return _worker_costs(shape, GpuShare.of(shape), rates, NO_COMMUNICATION, capacity)


def parallel_roofline(
    gpu: Gpu,
    shape: ModelShape,
    parallelism: Parallelism,
    prefill_efficiency: float | None = None,
    decode_efficiency: float | None = None,
) -> WorkerCosts:
    """Compute the costs of a worker whose GPUs share the model by ``parallelism``: each GPU reads
    and computes its own share (:class:`simulator.roofline.GpuShare`) at the same time as the
    others, and then they communicate (:mod:`simulator.roofline`). For one GPU, this is
    :func:`roofline`, to the bit. The efficiencies are those of :func:`roofline`. Raises Invalid for
    a model that does not fit, for sizes that don't divide it, and for arguments out of range."""
    parallelism.check(shape)
    share = GpuShare.of(shape, parallelism)
    rates = _Rates.of(gpu, 1, prefill_efficiency, decode_efficiency)
    capacity = _parallel_kv_capacity_tokens(gpu, shape, parallelism)
    cost = communication_cost(gpu, shape, parallelism)
    return _worker_costs(shape, share, rates, cost, capacity)


def fits(gpu: Gpu, shape: ModelShape, parallelism: Parallelism) -> bool:
    """Whether the sizes divide the model, and its weights leave memory for KV."""
    try:
        parallel_roofline(gpu, shape, parallelism)
    except Invalid:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Rates:
    """The FLOPs and the bytes per second that products and reads reach."""

    flops: float
    bandwidth: float

    @classmethod
    def of(
        cls,
        gpu: Gpu,
        num_gpus: int,
        prefill_efficiency: float | None,
        decode_efficiency: float | None,
    ) -> "_Rates":
        if prefill_efficiency is None:
            prefill_efficiency = gpu.matrix_efficiency
        if decode_efficiency is None:
            decode_efficiency = gpu.memory_efficiency
        shares = {"prefill_efficiency": prefill_efficiency, "decode_efficiency": decode_efficiency}
        for name, share in shares.items():
            if not 0 < share <= 1:
                raise Invalid(f"{name} is {share}; it must be above 0 and at most 1", param=name)
        return cls(
            gpu.flops_per_second * num_gpus * prefill_efficiency,
            gpu.bytes_per_second * num_gpus * decode_efficiency,
        )


def _worker_costs(
    shape: ModelShape,
    share: GpuShare,
    rates: _Rates,
    communication: CommunicationCost,
    capacity_tokens: int,
) -> WorkerCosts:
    prefill = _prefill_cost(share, rates, communication)
    decode = _decode_cost(shape, share, rates, communication)
    return WorkerCosts(
        prefill,
        decode,
        shape.kv_bytes_per_token,
        capacity_tokens,
        _step_cost(shape, share, rates, communication),
    )


def _prefill_cost(share: GpuShare, rates: _Rates, communication: CommunicationCost) -> PrefillCost:
    """Return the cost of a prefill. A token takes two operations per active parameter. In each
    layer, attention takes ``prefill_pair_flops`` operations for each pair of a query token and a
    key token. The fixed part is the time to read the weights, including those of all experts, since
    a few hundred tokens select all experts. This cost is the sum of reading and computing. In
    reality, the two overlap, so the cost is too high: by up to a factor of two, but little for a
    long prompt."""
    weights_seconds = (share.common_bytes + share.expert_bytes) / rates.bandwidth
    return PrefillCost(
        fixed_seconds=weights_seconds + communication.fixed_seconds,
        per_token_seconds=share.token_flops / rates.flops + communication.per_token_seconds,
        per_pair_seconds=share.prefill_pair_flops / rates.flops,
    )


def _decode_cost(
    shape: ModelShape, share: GpuShare, rates: _Rates, communication: CommunicationCost
) -> DecodeCost:
    """Return the cost of a decode step. A step reads the common weights once, the weights of the
    selected experts, and the KV of the context. Latent attention does so many operations per byte
    of KV that computing can take longer than reading."""
    return DecodeCost(
        fixed_seconds=share.common_bytes / rates.bandwidth + communication.fixed_seconds,
        per_request_seconds=share.token_flops / rates.flops + communication.per_token_seconds,
        per_context_token_seconds=_context_token_seconds(share, rates),
        expert_seconds=share.expert_bytes / rates.bandwidth,
        num_experts=shape.experts.routed if shape.experts else 0,
        experts_per_token=shape.experts.per_token if shape.experts else 0,
    )


def _step_cost(
    shape: ModelShape, share: GpuShare, rates: _Rates, communication: CommunicationCost
) -> StepCost:
    """Return the cost of a step with prompts and answers. Its weights are read once, whatever it
    computes, and while it computes."""
    return StepCost(
        overhead_seconds=STEP_OVERHEAD_SECONDS + communication.fixed_seconds,
        weights_seconds=share.common_bytes / rates.bandwidth,
        per_token_seconds=share.token_flops / rates.flops,
        per_pair_seconds=share.prefill_pair_flops / rates.flops,
        per_context_token_seconds=_context_token_seconds(share, rates),
        expert_seconds=share.expert_bytes / rates.bandwidth,
        num_experts=shape.experts.routed if shape.experts else 0,
        experts_per_token=shape.experts.per_token if shape.experts else 0,
        communication_per_token_seconds=communication.per_token_seconds,
    )


def _context_token_seconds(share: GpuShare, rates: _Rates) -> float:
    return max(share.kv_read_bytes / rates.bandwidth, share.decode_pair_flops / rates.flops)


def _kv_capacity_tokens(gpu: Gpu, shape: ModelShape, num_gpus: int) -> int:
    """Return how many tokens of KV ``num_gpus`` GPUs hold that share memory evenly."""
    usable = (1 - RESERVED_MEMORY_SHARE) * gpu.memory_bytes
    capacity = math.floor((usable * num_gpus - shape.weight_bytes) / shape.kv_bytes_per_token)
    if capacity >= 1:
        return capacity
    enough = math.ceil((shape.weight_bytes + shape.kv_bytes_per_token) / usable)
    raise _does_not_fit(gpu, shape, num_gpus, f"{enough} × {gpu.name} would be enough")


def _parallel_kv_capacity_tokens(gpu: Gpu, shape: ModelShape, parallelism: Parallelism) -> int:
    """Return how many tokens of KV a worker holds: each group of GPUs with all layers as many as
    one of its GPUs, whose KV heads no other group member may have."""
    capacity = _tokens_per_gpu(gpu, GpuShare.of(shape, parallelism))
    if capacity >= 1:
        return capacity * parallelism.num_replicas
    enough = (
        f"{size} would be enough"
        for size in (Parallelism(2**power) for power in range(MAX_TENSOR_POWER + 1))
        if shape.attention.query_heads % size.tensor == 0
        and _tokens_per_gpu(gpu, GpuShare.of(shape, size)) >= 1
    )
    advice = next(enough, "no tensor-parallel size would be enough")
    raise _does_not_fit(gpu, shape, parallelism.num_gpus, advice)


def _tokens_per_gpu(gpu: Gpu, share: GpuShare) -> int:
    usable = (1 - RESERVED_MEMORY_SHARE) * gpu.memory_bytes
    return math.floor((usable - share.weight_bytes) / share.kv_bytes_per_token)


def _does_not_fit(gpu: Gpu, shape: ModelShape, num_gpus: int, advice: str) -> Invalid:
    return Invalid(
        f"{shape.name} needs {shape.weight_bytes / GIB:.1f} GiB for its weights; {num_gpus} × "
        f"{gpu.name} has {gpu.memory_bytes * num_gpus / GIB:.0f} GiB, {RESERVED_MEMORY_SHARE:.0%} "
        f"of which is reserved. {advice}",
        param="gpu",
    )
