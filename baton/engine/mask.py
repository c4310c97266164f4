"""Applies the bit masks of allowed tokens to logits."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.plan import TokenMaskFunction
from baton.engine.upload import upload, upload_integers

Bits = NDArray[np.uint8]


def apply_masks(
    logits: torch.Tensor, masks: Sequence[TokenMaskFunction | None]
) -> tuple[torch.Tensor, frozenset[int]]:
    """Return ``logits`` [num_rows, vocab] with minus infinity for each token that is not allowed,
    and the indices of the rows whose mask allows no token. The input is not changed."""
    present = {index: mask for index, mask in enumerate(masks) if mask is not None}
    if not present:
        return logits, frozenset()
    bits = _pack(list(present.values()), logits.shape[-1])
    has_allowed: list[bool] = np.any(bits, axis=1).tolist()
    empty_rows = frozenset(i for i, any_ in zip(present, has_allowed, strict=True) if not any_)
    forbidden = _forbidden(bits, logits)
    if len(present) == len(masks):
        return logits.masked_fill(forbidden, -torch.inf), empty_rows
    rows = upload_integers(list(present), logits.device)
    masked = logits[rows].masked_fill_(forbidden, -torch.inf)
    return logits.index_copy(0, rows, masked), empty_rows


def _pack(masks: Sequence[TokenMaskFunction], vocab_size: int) -> Bits:
    """Pack masks into [num_masks, vocab / 8], lowest bit first, with no bit set beyond the
    vocabulary."""
    width = -(-vocab_size // 8)
    joined = b"".join(mask()[:width].ljust(width, b"\0") for mask in masks)
    packed = np.frombuffer(bytearray(joined), dtype=np.uint8).reshape(len(masks), width)
    if vocab_size % 8:
        packed[:, -1] &= (1 << vocab_size % 8) - 1
    return packed


def _forbidden(bits: Bits, logits: torch.Tensor) -> torch.Tensor:
    """Return which tokens are forbidden, as booleans [num_masks, vocab] on the device of
    ``logits``. For a GPU, the bits are copied to the device before they are unpacked, because they
    have an eighth of the booleans' size."""
    vocab_size = logits.shape[-1]
    if logits.device.type == "cpu":
        flags = np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(flags == 0)
    moved = upload(torch.from_numpy(bits), logits.device)
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=logits.device)
    return (moved.unsqueeze(-1) & powers).eq(0).flatten(1)[:, :vocab_size]
