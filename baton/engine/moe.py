"""A mixture-of-experts layer, computed expert by expert."""

from collections.abc import Callable

import torch

from baton.checkpoints.decoder_traits import ClampedSwiGlu, MoeConfig
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
    biases = weights.expert_gate_up_bias, weights.expert_down_bias

    def expert(index: int, part: torch.Tensor) -> torch.Tensor:
        wide = add_bias(ops.linear(part, gate_up[index]), biases[0], index)
        gated = activate_expert(wide, moe, ops)
        return add_bias(ops.linear(gated, down[index]), biases[1], index)

    return combine_experts(x, ops.linear(x, weights.router, weights.router_bias), expert, moe)


def add_bias(x: torch.Tensor, biases: torch.Tensor | None, index: int) -> torch.Tensor:
    """Add an expert's bias. As in transformers, the product ``x`` was rounded before."""
    return x if biases is None else x + biases[index]


def activate_expert(gate_up: torch.Tensor, moe: MoeConfig, ops: LayerOps) -> torch.Tensor:
    if moe.clamped is None:
        return ops.activate(gate_up)
    return clamped_swiglu(gate_up, moe.clamped)


def clamped_swiglu(gate_up: torch.Tensor, clamped: ClampedSwiGlu) -> torch.Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate). ``gate_up`` is [num_tokens, 2 * size]: its
    even columns are gate, the odd ones up."""
    gate = gate_up[:, ::2].clamp(max=clamped.limit)
    up = gate_up[:, 1::2].clamp(-clamped.limit, clamped.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * clamped.alpha))


def combine_experts(
    x: torch.Tensor, scores: torch.Tensor, expert: Expert, moe: MoeConfig
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's top experts. ``x`` is [num_tokens,
    hidden]; ``scores`` [num_tokens, num_experts] are the router's logits.

    Experts run in index order, and each token's contributions are added in that order, whatever
    else is in the batch."""
    weights, chosen = _choose_experts(scores, moe)
    weights = weights.to(x.dtype)
    output = torch.zeros_like(x)
    for index in torch.unique(chosen).tolist():
        tokens, ranks = torch.where(chosen == index)
        output[tokens] += expert(index, x[tokens]) * weights[tokens, ranks, None]
    return output


def _choose_experts(scores: torch.Tensor, moe: MoeConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the indices of each token's top experts, [num_tokens,
    experts_per_token]."""
    if moe.clamped is not None:
        best, chosen = scores.topk(moe.experts_per_token, dim=-1)
        return best.softmax(dim=-1), chosen
    probs = scores.softmax(dim=-1, dtype=torch.float32)
    weights, chosen = probs.topk(moe.experts_per_token, dim=-1)
    if moe.normalizes_weights:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen
