"""Launches Triton kernels with little work on the host.

Triton inspects every argument in each launch, and looks the kernel up by a text that it makes of
them. On an H100's host that took some 40 µs a launch, and a layer has five of them, so that a step
of 512 tokens waited for the host. Here a launch looks the kernel up by the properties of the
arguments on which Triton specializes.
"""

from collections.abc import Callable
from typing import Any

import torch

Grid = tuple[int, ...]


class KernelLauncher:
    """Launches ``kernel``, a function with ``@triton.jit``, in Triton's notation:
    ``launcher[grid](*arguments, CONSTANT=..., num_warps=...)``.

    The arguments that are not ``tl.constexpr`` are positional, in the kernel's order: tensors on
    one device, integers and floats. Constants and Triton's options are keywords. The kernel is
    compiled, by Triton, when it is first launched with such arguments.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            key = (specialization(arguments), *constants.items())
            found = self._compiled.get(key)
            if found is None:
                compiled = self.kernel[grid](*arguments, **constants)
                if compiled is not None:  # else Triton's interpreter has run it
                    names = self.kernel.arg_names[len(arguments) :]
                    self._compiled[key] = compiled, tuple(constants[name] for name in names)
            else:
                compiled, rest = found
                compiled[(*grid, 1, 1)[:3]](*arguments, *rest)

        return launch


def specialization(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return all that Triton's compiler uses of the arguments: the dtype of a tensor and whether
    its address is a multiple of 16, and of an integer whether it is 1, a multiple of 16, or does
    not fit into 32 bits. The first element is the tensors' device."""
    parts: list[Any] = [None]
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            parts[0] = argument.device
            parts += (argument.dtype, argument.data_ptr() % 16 == 0)
        elif isinstance(argument, int):
            is_wide = not -(2**31) <= argument < 2**31
            parts.append((argument == 1, argument % 16 == 0, is_wide))
        else:
            parts.append(float)
    return tuple(parts)


def ceil_div(size: int, part: int) -> int:
    """Return ``size / part``, rounded up. (``triton.cdiv`` takes microseconds.)"""
    return -(-size // part)


def power_of_2(size: int) -> int:
    """Return the smallest power of two that is at least ``size``, which must be positive."""
    return 1 << (size - 1).bit_length()
