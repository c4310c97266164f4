"""A mixture-of-experts layer, computed expert by expert."""

from collections.abc import Callable

import torch

from baton.checkpoint import MoeConfig
from baton.engine.loader import LayerWeights
from baton.engine.ops import LayerOps

Expert = Callable[[int, torch.Tensor], torch.Tensor]
"""Computes the output of the expert with this index for an input [num_tokens, hidden]."""


def moe_layer(
    x: torch.Tensor, weights: LayerWeights, moe: MoeConfig, ops: LayerOps
) -> torch.Tensor:
    """Return the layer's output for ``x`` [num_tokens, hidden]."""
    gate_up, down = weights.expert_gate_up, weights.expert_down
    assert weights.router is not None and gate_up is not None and down is not None

    def expert(index: int, part: torch.Tensor) -> torch.Tensor:
        return ops.linear(ops.silu_and_mul(ops.linear(part, gate_up[index])), down[index])

    return combine_experts(x, ops.linear(x, weights.router), expert, moe)


def combine_experts(
    x: torch.Tensor, scores: torch.Tensor, expert: Expert, moe: MoeConfig
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's top experts. ``x`` is [num_tokens,
    hidden]; ``scores`` [num_tokens, num_experts] are the router's logits.

    Experts run in index order, and each token's contributions are added in that order, whatever
    else is in the batch."""
    probs = scores.softmax(dim=-1, dtype=torch.float32)
    weights, chosen = probs.topk(moe.experts_per_token, dim=-1)
    if moe.normalizes_weights:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    weights = weights.to(x.dtype)
    output = torch.zeros_like(x)
    for index in torch.unique(chosen).tolist():
        tokens, ranks = torch.where(chosen == index)
        output[tokens] += expert(index, x[tokens]) * weights[tokens, ranks, None]
    return output
