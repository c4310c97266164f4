"""Tests how Triton kernels are looked up and launched, with a fake kernel."""

from typing import Any

import pytest
import torch

from baton.engine.cuda.launch import KernelLauncher

BIG = torch.zeros(64)


class Kernel:
    """A fake of a function with ``@triton.jit``. It records its compilations and the launches of
    what it has compiled."""

    arg_names = ("x_ptr", "count", "scale", "WIDTH", "FLAG")

    def __init__(self) -> None:
        self.compilations: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*arguments: Any, **constants: Any) -> "Compiled":
            self.compilations.append((grid, arguments, constants))
            return Compiled(self, len(self.compilations))

        return compile_and_launch


class Compiled:
    def __init__(self, kernel: Kernel, number: int) -> None:
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.kernel.launches.append((self.number, grid, *arguments))


def test_second_launch_goes_to_the_compiled_kernel() -> None:
    kernel = Kernel()
    launch = KernelLauncher(kernel)
    launch[(3,)](BIG, 32, 0.5, FLAG=True, WIDTH=8, num_warps=4)
    assert len(kernel.compilations) == 1 and not kernel.launches
    other = torch.ones(64)
    launch[5, 2](other, 48, 0.25, FLAG=True, WIDTH=8, num_warps=4)
    assert len(kernel.compilations) == 1
    ((number, grid, tensor, *rest),) = kernel.launches
    assert (number, grid, rest) == (1, (5, 2, 1), [48, 0.25, 8, True]) and tensor is other


@pytest.mark.parametrize(
    ("arguments", "constants"),
    [
        ((BIG.half(), 32, 0.5), {}),
        ((BIG[1:], 32, 0.5), {}),
        ((BIG, 1, 0.5), {}),
        ((BIG, 33, 0.5), {}),
        ((BIG, 2**32, 0.5), {}),
        ((BIG, 32, 0.5), {"WIDTH": 16}),
        ((BIG, 32, 0.5), {"num_warps": 8}),
    ],
)
def test_whatever_triton_specializes_on_is_compiled_anew(
    arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    kernel = Kernel()
    launch = KernelLauncher(kernel)
    usual = {"WIDTH": 8, "FLAG": False, "num_warps": 4}
    launch[(1,)](BIG, 32, 0.5, **usual)
    launch[(1,)](*arguments, **usual | constants)
    assert len(kernel.compilations) == 2
    launch[(1,)](BIG, 32, 0.5, **usual)
    launch[(1,)](*arguments, **usual | constants)
    assert [number for number, *_ in kernel.launches] == [1, 2]


def test_interpreter_is_called_each_time() -> None:
    calls: list[tuple[Any, ...]] = []

    class Interpreted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **_: calls.append((grid, *arguments))

    launch = KernelLauncher(Interpreted())
    for _ in range(2):
        launch[(2,)](7, WIDTH=8)
    assert calls == [((2,), 7)] * 2
