"""Measure kernels, steps, an engine, KV transfer and a cluster on a GPU.

    python -m benchmarks.gpu [--rounds 10] [--only PART …] [--list]

Needs a GPU, and the packages torch, triton, safetensors and psutil; parts that start an engine or a
cluster need Baton's other dependencies. Each part runs in a process of its own with a time limit,
so that a part that raises an error, crashes or hangs is reported, and the others still run. Prints
a table, and JSON as the last line. Exits with 1 if a part failed or found a wrong result, and with
2 if there is no GPU. ``tests/gpu`` checks results.
"""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import import_module

import torch

from benchmarks.gpu.timing import GpuTableRow
from testkit.machine import describe

PARTS: dict[str, tuple[str, str, Sequence[object], float]] = {
    "ceilings": ("kernels", "ceilings", (), 30),
    "kv transfer": ("kv_transfer", "transfers", ("cuda_ipc",), 60),
    "kv transfer with NIXL": ("kv_transfer", "transfers", ("nixl",), 60),
    "speed of Qwen3-8B": ("kernels", "models", ("rounds",), 150),
    "speed of prefill attention": ("kernels", "prefill_attention", ("rounds",), 60),
    "speed of decode attention": ("kernels", "decode_attention", ("rounds",), 60),
    "speed of layer kernels": ("kernels", "layer_kernels", ("rounds",), 60),
    "speed of fixed products": ("kernels", "products", ("rounds",), 60),
    "speed of KV codecs": ("kv_codecs", "codec_speeds", ("rounds",), 60),
    "speed of sampling": ("kernels", "sampling", ("rounds",), 60),
    "speed of an engine": ("engine", "engine_steps", ("rounds",), 120),
    "speed of an engine under load": ("engine_load", "engine_load", (), 120),
    "speed of FP8 weights": ("fp8", "weights", ("rounds",), 150),
    "speed of FP8 KV": ("fp8", "kv", ("rounds",), 150),
    "speed of a cluster": ("cluster", "cluster_speed", (), 300),
}
"""For each part its module in this package, its function and the function's arguments, and its time
limit in seconds. The longest parts come last."""


def measure(name: str, rounds: int) -> Iterable[GpuTableRow]:
    """Run a part in this process."""
    module, function, arguments, _ = PARTS[name]
    given = [rounds if argument == "rounds" else argument for argument in arguments]
    found: Iterable[GpuTableRow] = getattr(import_module(f"benchmarks.gpu.{module}"), function)(
        *given
    )
    return found


def run_in_process(name: str, rounds: int) -> list[GpuTableRow]:
    """Run a part in a process of its own, and print its rows. If it fails or takes too long, add a
    row that says so."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--rounds", str(rounds)]
    limit = str(PARTS[name][3])
    # "timeout" interrupts the part first, so that it can stop the processes that it has started
    process = subprocess.Popen(
        ["timeout", "--signal=INT", "--kill-after=20", limit, *command],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    rows: list[GpuTableRow] = []
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                rows.append(GpuTableRow(**json.loads(line)))
                print(rows[-1], flush=True)
    if process.returncode:
        why = f"the part exited with {process.returncode} (124 and 137: after {limit} s)"
        rows.append(GpuTableRow(name, why, ok=False))
        print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # in its own process
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(PARTS))
        return 0
    if not torch.cuda.is_available():
        print("torch sees no GPU here", file=sys.stderr)
        return 2
    if options.part:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" ignores it
        for row in measure(options.part, options.rounds):
            print(json.dumps(asdict(row)), flush=True)
        return 0
    gpu = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    about = {**describe(), **gpu, "rounds": options.rounds}
    print(about, flush=True)
    rows = {name: run_in_process(name, options.rounds) for name in options.only}
    ok = all(row.ok for part in rows.values() for row in part)
    table = {name: [asdict(row) for row in part] for name, part in rows.items()}
    print(json.dumps({**about, "ok": ok, "rows": table}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
