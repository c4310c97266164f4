"""Copies from the host to a GPU that neither the host nor the device waits for."""

from collections.abc import Sequence

import torch


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor``, which is on the host, on ``device``. For a GPU the copy is asynchronous,
    in the order of the current stream: a copy from memory that is not pinned would wait until the
    device has finished all work before it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_integers(
    values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Return ``values`` as a tensor on ``device``, copied as by :func:`upload`."""
    return upload(torch.tensor(values, dtype=dtype), device)
