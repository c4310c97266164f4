"""The communication between the GPUs of a worker."""

from dataclasses import dataclass

from simulator.gpu_link import CollectiveCost
from simulator.hardware import Gpu
from simulator.model_shapes import ModelShape
from simulator.parallelism import Parallelism

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
