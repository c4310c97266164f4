"""Measures reads of KV blocks between two processes on one GPU through Baton's NIXL transport, and
checks what happens when the source is killed during a read; run by ``gpu_check``.

    python -m tools.gpu_transport source | reader

The source prints its endpoint as JSON; the reader gets it on its standard input, and prints a
report. Both use the class that workers use, ``NixlTransport``, on memory that torch has allocated.
"""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tools.gpu_speed import copy_rate
from tools.gpu_timing import GpuTableRow, device

SEED = 20261126
BLOCK_BYTES = 16 * 147_456
"""The size of a block of 16 tokens of Qwen3-8B in BF16."""

NUM_BLOCKS = 2048
TOKENS = (512, 4096, 32_768)
ROUNDS = 5
TIMEOUT_SECONDS = 60.0
KILL_TIMEOUT_SECONDS = 2.0
"""The deadline of the read whose source is killed."""


@dataclass(frozen=True)
class ReadReport:
    """What the reader saw: the median seconds of a read of each number of blocks, whether all bytes
    were right, and how the read ended whose source was killed."""

    seconds: dict[str, float]
    equal: bool
    killed: str
    is_released: bool


def nixl_transfer() -> Iterator[GpuTableRow]:
    what = "KV transfer between two processes, NIXL"
    try:
        import nixl_cu13  # noqa: F401
        import structlog  # noqa: F401
    except ImportError as error:
        yield GpuTableRow(what, f"not run: {error.name} is not installed")
        return
    source = _start("source", stdin=subprocess.DEVNULL)
    try:
        assert source.stdout is not None
        line = source.stdout.readline()
        if not line:
            source.wait(TIMEOUT_SECONDS)
            assert source.stderr is not None
            raise RuntimeError(f"the source exited: {source.stderr.read()[-300:]}")
        endpoint = json.dumps({**json.loads(line), "pid": source.pid})
        reader = _start("reader", stdin=subprocess.PIPE)
        try:
            output, errors = reader.communicate(endpoint, TIMEOUT_SECONDS)
        finally:
            reader.kill()
        if reader.returncode:
            raise RuntimeError(f"the reader exited with {reader.returncode}: {errors[-300:]}")
        report = ReadReport(**json.loads(output.splitlines()[-1]))
    finally:
        source.kill()
        source.wait()
    for tokens, seconds in report.seconds.items():
        rate = int(tokens) // 16 * BLOCK_BYTES / seconds
        yield GpuTableRow(
            f"{what}, {tokens} tokens of Qwen3-8B",
            f"{rate / 1e9:.0f} GB/s" + ("" if report.equal else ", but the bytes differ"),
            seconds,
            2 * rate / copy_rate(),
            "a copy's bytes",
            ok=report.equal,
        )
    result = f"{report.killed}; " + ("released" if report.is_released else "not released")
    yield GpuTableRow(f"{what}, the source is killed", result)


def _start(role: str, stdin: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tools.gpu_transport", role],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
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


def _open(owner: str, blocks: torch.Tensor) -> Any:
    from baton.clock import SystemClock
    from baton.transport.base import Region
    from baton.transport.nixl import NixlTransport
    from baton.transport.selection import host_id

    transport = NixlTransport(owner, 1, SystemClock(), host_id())
    transport.register(Region(blocks.data_ptr(), blocks.nbytes, str(blocks.device)))
    return transport


def serve() -> None:
    blocks = pool(is_source=True)
    torch.cuda.synchronize()
    transport = _open("source", blocks)
    endpoint = transport.export()
    metadata = base64.b64encode(endpoint.metadata).decode()
    print(json.dumps({**asdict(endpoint), "metadata": metadata}), flush=True)
    signal.pause()


def read(source: dict[str, Any]) -> dict[str, object]:
    """Read from the source; then kill it during a read."""
    from baton.transport.base import Endpoint, TransferRange, TransferState

    blocks, wanted = pool(is_source=False), pool(is_source=True)
    transport = _open("reader", blocks)
    pid = source.pop("pid")
    metadata = base64.b64decode(source.pop("metadata"))
    peer = transport.connect(Endpoint(**source, metadata=metadata))
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(SEED)).tolist()

    def post(count: int, timeout_seconds: float) -> Any:
        ranges = [
            TransferRange(block * BLOCK_BYTES, place * BLOCK_BYTES, BLOCK_BYTES)
            for place, block in enumerate(order[:count])
        ]
        transfer = transport.prepare(peer, ranges, timeout_seconds)
        transport.post(transfer)
        return transfer

    def ended(transfer: Any) -> TransferState:
        while (state := transport.poll(transfer)) is TransferState.PENDING:
            pass
        return TransferState(state)

    seconds, equal = {}, True
    for tokens in TOKENS:
        count, times = tokens // 16, []
        for _ in range(ROUNDS):
            blocks.zero_()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            transfer = post(count, TIMEOUT_SECONDS)
            state = ended(transfer)
            times.append(time.perf_counter() - begun)
            assert state is TransferState.DONE, transfer.error
            assert transport.release(transfer)
            equal &= torch.equal(blocks[:count], wanted[order[:count]])
        seconds[str(tokens)] = sorted(times)[ROUNDS // 2]
    blocks.zero_()
    torch.cuda.synchronize()
    os.kill(pid, signal.SIGSTOP)
    frozen = post(NUM_BLOCKS, KILL_TIMEOUT_SECONDS)
    os.kill(pid, signal.SIGKILL)
    state, right = ended(frozen), torch.equal(blocks, wanted[order])
    bytes_are = "bytes right" if right else "bytes not right"
    killed = f"{state}, {frozen.error or 'no error'}, {bytes_are}"
    return {"seconds": seconds, "equal": equal, "killed": killed,
            "is_released": transport.release(frozen)}  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "source":
        serve()
    else:
        print(json.dumps(read(json.loads(sys.stdin.read()))))
