"""Which tokens may come next, from bits to logits."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.plan import ReadMask

Bits = NDArray[np.uint8]


def apply_masks(
    logits: torch.Tensor, masks: Sequence[ReadMask | None]
) -> tuple[torch.Tensor, frozenset[int]]:
    """``logits`` [num_rows, vocab], with minus infinity for what may not come, and the rows where
    nothing may. What is given is not changed."""
    given = {index: mask for index, mask in enumerate(masks) if mask is not None}
    if not given:
        return logits, frozenset()
    bits = _pack(list(given.values()), logits.shape[-1])
    some: list[bool] = np.any(bits, axis=1).tolist()
    barren = frozenset(index for index, any_ in zip(given, some, strict=True) if not any_)
    forbidden = _forbidden(bits, logits)
    if len(given) == len(masks):
        return logits.masked_fill(forbidden, -torch.inf), barren
    lines = torch.tensor(list(given), device=logits.device)
    held = logits[lines].masked_fill_(forbidden, -torch.inf)
    return logits.index_copy(0, lines, held), barren


def _pack(masks: Sequence[ReadMask], vocab_size: int) -> Bits:
    """[num_masks, vocab / 8], lowest bit first, with none set beyond the vocabulary."""
    width = -(-vocab_size // 8)
    joined = b"".join(mask()[:width].ljust(width, b"\0") for mask in masks)
    packed = np.frombuffer(bytearray(joined), dtype=np.uint8).reshape(len(masks), width)
    if vocab_size % 8:
        packed[:, -1] &= (1 << vocab_size % 8) - 1
    return packed


def _forbidden(bits: Bits, logits: torch.Tensor) -> torch.Tensor:
    """[num_masks, vocab] booleans where ``logits`` are; a device gets the bits, an eighth of it."""
    vocab_size = logits.shape[-1]
    if logits.device.type == "cpu":
        flags = np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(flags == 0)
    moved = torch.from_numpy(bits).to(logits.device)
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=logits.device)
    return (moved.unsqueeze(-1) & powers).eq(0).flatten(1)[:, :vocab_size]
