"""Measures reads of KV blocks between two processes on one GPU through Baton's transports, and
checks what a read gives whose source was killed.

    python -m benchmarks.gpu.kv_transfer source|reader TRANSPORT

The source prints its endpoint as JSON; the reader gets it on its standard input, and prints a line
of JSON for each measurement. Both open the transport as workers do, on memory that torch has
allocated.
"""

import base64
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.gpu.kernels import copy_rate
from benchmarks.gpu.timing import GpuTableRow, device

SEED = 20261126
BLOCK_BYTES = 16 * 147_456
"""The size of a block of 16 tokens of Qwen3-8B in BF16."""

NUM_BLOCKS = 2048
TOKENS = {"cuda_ipc": (512, 4096, 32_768), "nixl": (512,)}
"""The numbers of tokens to read over each transport. NIXL is slow without a network (docs/cuda.md),
so that its figure tells whether a later version is better."""

ROUNDS = 5
READ_SECONDS = 8.0
"""The deadline of each read."""

PROCESS_SECONDS = 60.0
"""The time that the reader gets to exit after its last line."""


def transfers(name: str) -> Iterator[GpuTableRow]:
    """Measure the transport ``name``. If a read fails, the remaining rows are missing."""
    what = f"KV transfer between two processes, {name}"
    source = _start("source", name, stdin=subprocess.DEVNULL)
    try:
        assert source.stdout is not None and source.stderr is not None
        line = source.stdout.readline()
        if not line:
            raise RuntimeError(f"the source exited: {source.stderr.read()[-300:]}")
        reader = _start("reader", name, stdin=subprocess.PIPE)
        assert reader.stdin is not None and reader.stdout is not None
        try:
            reader.stdin.write(json.dumps({**json.loads(line), "pid": source.pid}))
            reader.stdin.close()
            for measured in map(json.loads, reader.stdout):
                yield _row(what, **measured)
            if reader.wait(PROCESS_SECONDS):
                raise RuntimeError(f"the reader exited with {reader.returncode}")
        finally:
            reader.kill()
    finally:
        source.kill()
        source.wait()


def _row(what: str, case: str, size: int, seconds: float, error: str, equal: bool) -> GpuTableRow:
    if error:
        return GpuTableRow(f"{what}, {case}", error, ok=equal)
    rate = size / seconds
    result = f"{rate / 1e9:.0f} GB/s" + ("" if equal else ", but the bytes differ")
    ratio = 2 * rate / copy_rate()
    return GpuTableRow(f"{what}, {case}", result, seconds, ratio, "a copy's bytes", ok=equal)


def _start(role: str, name: str, stdin: int) -> "subprocess.Popen[str]":
    """Start a process. The reader's errors go to this process's standard error."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.kv_transfer", role, name],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if role == "source" else None,
        text=True,
    )


def pool(*, is_source: bool) -> torch.Tensor:
    """Return the blocks [NUM_BLOCKS, BLOCK_BYTES]: the source's contain a pattern that the reader
    knows, the reader's are zero."""
    if not is_source:
        return torch.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device=device())
    chance = torch.Generator(device()).manual_seed(SEED)
    shape = (NUM_BLOCKS, BLOCK_BYTES)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device(), generator=chance)


def open_transport(name: str, owner: str, blocks: torch.Tensor) -> Any:
    from baton.clock import SystemClock
    from baton.transport.base import Region
    from baton.transport.selection import open_transports

    (transport,) = open_transports(
        [name], owner=owner, generation=1, clock=SystemClock(), listen_host="127.0.0.1",
        region=Region(blocks.data_ptr(), blocks.nbytes, str(blocks.device)),
    ).values()  # fmt: skip
    return transport


def serve(name: str) -> None:
    blocks = pool(is_source=True)
    torch.cuda.synchronize()
    transport = open_transport(name, "source", blocks)  # serves as long as it is referenced
    endpoint = transport.export()
    metadata = base64.b64encode(endpoint.metadata).decode()
    print(json.dumps({**asdict(endpoint), "metadata": metadata}), flush=True)
    signal.pause()


class Reader:
    """Reads the blocks of a source, in an order in which no two are adjacent on both sides."""

    def __init__(self, name: str, source: dict[str, Any]) -> None:
        from baton.transport.base import Endpoint

        self.blocks, self.wanted = pool(is_source=False), pool(is_source=True)
        self.transport = open_transport(name, "reader", self.blocks)
        metadata = base64.b64decode(source.pop("metadata"))
        self.endpoint = Endpoint(**source, metadata=metadata)
        self.peer = self.transport.connect(self.endpoint)
        chance = torch.Generator().manual_seed(SEED)
        self.order = torch.randperm(NUM_BLOCKS, generator=chance).tolist()

    def refusal_of_larger_region(self) -> str:
        """Return why a region of twice the source's size is refused, or an empty string if it
        isn't: the driver knows that the source's allocation is smaller."""
        from baton.errors import Invalid

        size, generation = 2 * self.endpoint.region_size_bytes, self.endpoint.generation + 1
        try:
            self.transport.connect(
                replace(self.endpoint, region_size_bytes=size, generation=generation)
            )
        except Invalid as error:
            return str(error)
        return ""

    def read(self, count: int, kill: int = 0) -> tuple[float, str, bool]:
        """Read ``count`` blocks. Return the seconds, the error (or an empty string), and whether
        the bytes are right. If ``kill`` is a process id, kill that process first."""
        from baton.transport.base import TransferRange, TransferState

        self.blocks.zero_()
        torch.cuda.synchronize()
        ranges = [
            TransferRange(block * BLOCK_BYTES, place * BLOCK_BYTES, BLOCK_BYTES)
            for place, block in enumerate(self.order[:count])
        ]
        if kill:
            os.kill(kill, signal.SIGKILL)
        begun = time.perf_counter()
        transfer = self.transport.prepare(self.peer, ranges, READ_SECONDS)
        self.transport.post(transfer)
        while self.transport.poll(transfer) is TransferState.PENDING:
            pass
        seconds, error = time.perf_counter() - begun, transfer.error
        if not self.transport.release(transfer):
            error += "; the transfer could not be ended"
        return seconds, error, torch.equal(self.blocks[:count], self.wanted[self.order[:count]])


def read(name: str, source: dict[str, Any]) -> None:
    """Read each number of tokens in ``TOKENS`` several times, and print the median. With CUDA IPC,
    then check that a region beyond the source's allocation is refused, kill the source, read, and
    check that this process can still use the GPU."""
    pid = source.pop("pid")
    reader = Reader(name, source)
    for tokens in TOKENS[name]:
        count = tokens // 16
        rounds = [reader.read(count)]
        while len(rounds) < ROUNDS and not rounds[-1][1]:
            rounds.append(reader.read(count))
        error = rounds[-1][1]
        _print(
            f"{tokens} tokens of Qwen3-8B",
            count * BLOCK_BYTES,
            statistics.median(seconds for seconds, *_ in rounds),
            f"failed: {error}" if error else "",
            not error and all(equal for *_, equal in rounds),
        )
        if error:
            return
    if name != "cuda_ipc":
        return
    refusal = reader.refusal_of_larger_region()
    _print("a region beyond the allocation", 0, 0.0, refusal or "not refused", bool(refusal))
    _, error, equal = reader.read(NUM_BLOCKS, kill=pid)
    works = bool((torch.ones(8, device=device()).sum() == 8).item())
    right = "right" if equal else "not right, as their checksums would show"
    _print("source killed", 0, 0.0, f"{error or 'done'}; the bytes are {right}", works)


def _print(case: str, size: int, seconds: float, error: str, equal: bool) -> None:
    report = {"case": case, "size": size, "seconds": seconds, "error": error, "equal": equal}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "source":
        serve(sys.argv[2])
    else:
        read(sys.argv[2], json.loads(sys.stdin.read()))
