"""A mixture-of-experts layer: each token through its few experts, grouped by expert."""

import torch
from torch.nn import functional

from baton.checkpoint import Moe
from baton.engine.loader import LayerWeights


def mixture(x: torch.Tensor, weights: LayerWeights, moe: Moe) -> torch.Tensor:
    """``x`` [num_tokens, hidden]. Experts run in the order of their numbers, and each token's
    contributions are added in that order, whatever else is in the batch."""
    assert weights.router is not None
    assert weights.expert_gate_up is not None and weights.expert_down is not None
    chances = functional.linear(x, weights.router).softmax(dim=-1, dtype=torch.float32)
    shares, chosen = chances.topk(moe.experts_per_token, dim=-1)
    if moe.normalise:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    shares = shares.to(x.dtype)
    output = torch.zeros_like(x)
    for expert in torch.unique(chosen).tolist():
        tokens, ranks = torch.where(chosen == expert)
        hidden = gated(x[tokens], weights.expert_gate_up[expert])
        out = functional.linear(hidden, weights.expert_down[expert])
        output.index_add_(0, tokens, out * shares[tokens, ranks, None])
    return output


def gated(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up, from the joined weight [2 * size, hidden]."""
    gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
    return functional.silu(gate) * up
