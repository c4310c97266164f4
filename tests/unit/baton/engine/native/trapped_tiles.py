"""Runs the kernels for AMX on a processor without AMX, in a process of its own.

    python -m tests.unit.baton.engine.native.trapped_tiles FOLDER

Every tile instruction traps and is executed in software (tile_trap.cpp), so this shows which
instructions the real kernels execute, on which tiles and addresses, and that their results have
the bits of the emulated tiles. Prints how often each instruction was executed.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from baton.engine.native import build, processor
from baton.engine.native.matrix import KernelThreadPool, PackedMatrix
from baton.engine.native.processor import EMULATED_AMX, limit_instruction_set
from testkit.model_zoo import make_model
from tests.determinism import RandomPlacement, requests_alone

SEED = 20261126
INSTRUCTIONS = ("ldtilecfg, sttilecfg", "tilezero", "tileloadd", "tilestored", "tdpbf16ps")


def install(folder: Path) -> ctypes.CDLL:
    """Compile the trap and install it in this process, and let the processor appear to have AMX."""
    source, library = Path(__file__).with_name("tile_trap.cpp"), folder / "trap.so"
    flags = ["-std=c++17", "-O3", "-mavx2", "-mfma", "-ffp-contract=off", "-fPIC", "-shared"]
    subprocess.run(
        [build.find_compiler(), *flags, str(source), "-o", str(library)], check=True, timeout=300
    )
    trap = ctypes.CDLL(str(library))
    trap.tile_trap_count.restype = ctypes.c_long
    assert trap.tile_trap_install() == 0
    features = processor.features() | {"amx_tile", "amx_bf16"}
    processor.features = lambda: features  # type: ignore[assignment]
    processor.tiles_permitted = lambda: True  # type: ignore[assignment]
    return trap


def check_products() -> None:
    torch.manual_seed(SEED)
    for outs, ins in [(65, 34), (130, 1058)]:
        weight, x = torch.randn(outs, ins).bfloat16(), torch.randn(70, ins).bfloat16()
        for quantization in ("none", "int8"):
            results = []
            for name in ("amx", EMULATED_AMX):
                with limit_instruction_set(name):
                    packed = PackedMatrix(KernelThreadPool(2), weight, quantization=quantization)
                results.append(torch.cat([packed(x[:count]) for count in (1, 16, 17, 48, 70)]))
            same = torch.equal(results[0].view(torch.int16), results[1].view(torch.int16))
            assert same, (outs, ins, quantization)


def check_models(folder: Path) -> None:
    """Run a random placement of two models, on workers of which some have the real tiles."""
    chance = np.random.default_rng(SEED)
    for name in ("qwen2", "qwen3-odd"):
        path = make_model(folder / name, name, seed=SEED)
        requests = requests_alone(path, torch.bfloat16, chance, "on", "amx")
        RandomPlacement(path, torch.bfloat16, chance, instructions=["amx", EMULATED_AMX]).run(
            requests
        )


def main(folder: Path) -> None:
    trap = install(folder)
    check_products()
    check_models(folder)
    for kind, name in enumerate(INSTRUCTIONS):
        print(f"{name}: {trap.tile_trap_count(kind)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
