"""Transformers' tokens with the mask of an attention window, as a reference."""

import torch
from transformers import AutoModelForCausalLM

from baton.core.attention_window import AttentionWindow
from tests.exactness import Reference


def window_mask(num_tokens: int, window: AttentionWindow) -> torch.Tensor:
    """Return which tokens (columns) each token (row) attends to."""
    positions = torch.arange(num_tokens)
    ages = positions[:, None] - positions[None, :]
    is_sink = positions[None, :] < window.sink_tokens
    return (ages >= 0) & ((ages < window.recent_tokens) | is_sink)


@torch.inference_mode()
def masked_reference_of(
    model: AutoModelForCausalLM, prompt: list[int], num_tokens: int, window: AttentionWindow
) -> Reference:
    """Decode greedily with transformers, computing all tokens anew for each token."""
    known, margins = list(prompt), []
    for _ in range(num_tokens):
        mask = torch.where(window_mask(len(known), window), 0.0, float("-inf"))
        output = model(
            input_ids=torch.tensor([known]), attention_mask=mask[None, None], use_cache=False
        )
        best = output.logits[0, -1].float().topk(2)
        known.append(int(output.logits[0, -1].argmax()))
        margins.append(float(best.values[0] - best.values[1]))
    return Reference(prompt, known[len(prompt) :], margins)
