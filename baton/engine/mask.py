"""Which tokens may come next, from bits to logits."""

from collections.abc import Sequence

import numpy as np
import torch

from baton.engine.plan import Mask


def masked(
    logits: torch.Tensor, masks: Sequence[Mask | None]
) -> tuple[torch.Tensor, frozenset[int]]:
    """``logits`` [num_rows, vocab], with minus infinity for what may not come, and the rows where
    nothing may. What is given is not changed."""
    indices = [index for index, mask in enumerate(masks) if mask is not None]
    if not indices:
        return logits, frozenset()
    vocab_size = logits.shape[-1]
    packed = np.zeros((len(indices), -(-vocab_size // 8)), dtype=np.uint8)
    for line, index in zip(packed, indices, strict=True):
        mask = masks[index]
        assert mask is not None
        bits = np.frombuffer(mask(), dtype=np.uint8)[: len(line)]
        line[: len(bits)] = bits
    allowed = _unpack(torch.from_numpy(packed).to(logits.device))[:, :vocab_size]
    lines = torch.tensor(indices, device=logits.device)
    scores = logits.index_copy(0, lines, logits[lines].masked_fill(~allowed, -torch.inf))
    some = allowed.any(dim=-1).tolist()
    return scores, frozenset(i for i, any_ in zip(indices, some, strict=True) if not any_)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """[num_rows, num_bytes] of 8 bits, lowest first, to [num_rows, 8 * num_bytes] booleans."""
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) & powers).ne(0).flatten(1)
