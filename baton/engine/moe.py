"""A mixture-of-experts layer: each token through its few experts, grouped by expert."""

from collections.abc import Callable

import torch

from baton.checkpoint import Moe
from baton.engine.loader import LayerWeights
from baton.engine.ops import LayerOps

Expert = Callable[[int, torch.Tensor], torch.Tensor]
"""What an expert, by its number, makes of [num_tokens, hidden]."""


def moe_layer(x: torch.Tensor, weights: LayerWeights, moe: Moe, ops: LayerOps) -> torch.Tensor:
    """``x`` [num_tokens, hidden]."""
    gate_up, down = weights.expert_gate_up, weights.expert_down
    assert weights.router is not None and gate_up is not None and down is not None

    def expert(index: int, some: torch.Tensor) -> torch.Tensor:
        return ops.linear(ops.gated(ops.linear(some, gate_up[index])), down[index])

    return combine_experts(x, ops.linear(x, weights.router), expert, moe)


def combine_experts(
    x: torch.Tensor, scores: torch.Tensor, expert: Expert, moe: Moe
) -> torch.Tensor:
    """``x`` [num_tokens, hidden], ``scores`` [num_tokens, num_experts]. Experts run in the order of
    their numbers, and each token's contributions are added in that order, whatever else is in the
    batch."""
    chances = scores.softmax(dim=-1, dtype=torch.float32)
    shares, chosen = chances.topk(moe.experts_per_token, dim=-1)
    if moe.normalise:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    shares = shares.to(x.dtype)
    output = torch.zeros_like(x)
    for index in torch.unique(chosen).tolist():
        tokens, ranks = torch.where(chosen == index)
        output[tokens] += expert(index, x[tokens]) * shares[tokens, ranks, None]
    return output
