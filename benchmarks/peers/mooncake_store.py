"""Mooncake's store as a peer: put and get of a value through its Python API, over loopback's TCP.

    python benchmarks/peers/mooncake_store.py [--rounds N] [--sizes 4096,1048576,16777216]

Runs in an environment of its own with the package mooncake-transfer-engine-non-cuda, and needs
nothing of ours. ``across``: one process owns the memory, another puts and gets. ``embedded``: one
process does both. Pages are touched before. Prints JSON as the last line.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

SEGMENT = 3 << 29
BUFFER = 256 << 20
LEASE_SECONDS = 0.5
PACKAGE = "mooncake-transfer-engine-non-cuda"


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def open_store(master: str, segment: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 256 << 20, "tcp", "", master)
    if code:
        raise RuntimeError(f"setup says {code}")
    return store


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def master(folder: Path) -> Iterator[str]:
    import mooncake

    port, metrics = free_port(), free_port()
    binary = Path(mooncake.__path__[0]) / "mooncake_master"
    log = folder / "master.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                str(binary),
                f"-rpc_port={port}",
                f"-metrics_port={metrics}",
                f"-default_kv_lease_ttl={LEASE_SECONDS * 1000:.0f}",
            ],
            stdout=file,
            stderr=file,
        )
        try:
            for _ in range(200):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                pause(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


class Buffer:
    """Registered memory, touched."""

    def __init__(self, store: Any) -> None:
        self.memory = mmap.mmap(-1, BUFFER)
        self.memory[:] = os.urandom(1 << 20) * (BUFFER >> 20)
        self._pin = (ctypes.c_char * BUFFER).from_buffer(self.memory)
        self.address = ctypes.addressof(self._pin)
        if store.register_buffer(self.address, BUFFER):
            raise RuntimeError("register_buffer failed")


def timed(action: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    value = action(*arguments)
    return time.perf_counter() - began, value


def measure(store: Any, mode: str, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    buffer = Buffer(store)
    rows = []
    for size in sizes:
        places = BUFFER // size
        for api in ("bytes", "zero_copy"):
            times: dict[str, list[float]] = {"put": [], "get": []}
            for turn in range(rounds + 3):
                key = f"{mode}-{size}-{api}-{turn}"
                source, target = 2 * turn % places * size, (2 * turn + 1) % places * size
                if api == "bytes":
                    value = buffer.memory[source : source + size]
                    seconds, code = timed(store.put, key, value)
                    check(code, key)
                    got_seconds, got = timed(store.get, key)
                else:
                    seconds, code = timed(store.put_from, key, buffer.address + source, size)
                    check(code, key)
                    got_seconds, count = timed(store.get_into, key, buffer.address + target, size)
                    assert count == size, count
                    got = buffer.memory[target : target + size]
                assert got == buffer.memory[source : source + size], "another value came back"
                if turn >= 3:
                    times["put"].append(seconds)
                    times["get"].append(got_seconds)
            pause(LEASE_SECONDS + 0.1)  # until the leases that gets take are over
            for turn in range(rounds + 3):
                store.remove(f"{mode}-{size}-{api}-{turn}")
            for op, all_seconds in times.items():
                median = statistics.median(all_seconds)
                rows.append(
                    {
                        "mode": mode,
                        "api": api,
                        "op": op,
                        "size_bytes": size,
                        "median_seconds": median,
                        "p90_seconds": statistics.quantiles(all_seconds, n=10)[8],
                        "gigabytes_per_second": size / median / 1e9,
                    }
                )
                print(f"{mode} {api} {op} {size}: {median * 1e3:.3f} ms", file=sys.stderr)
    return rows


def check(code: int, key: str) -> None:
    if code:
        raise RuntimeError(f"put of {key} says {code}")


def warm(store: Any, segment: int) -> None:
    """Fills and empties the segment once, so that its pages are touched."""
    value = bytes(16 << 20)
    names = []
    for number in range(segment * 3 // 4 // len(value)):
        if store.put(f"warm-{number}", value):
            break
        names.append(f"warm-{number}")
    pause(LEASE_SECONDS + 0.1)
    for name in names:
        store.remove(name)


def serve(address: str) -> None:
    """Owns the memory until its input ends."""
    store = open_store(address, SEGMENT)
    warm(store, SEGMENT)
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--sizes", default="4096,1048576,16777216")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--embedded", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes = [int(size) for size in options.sizes.split(",")]
    if options.serve:
        serve(options.serve)
        return
    if options.embedded:
        store = open_store(options.embedded, SEGMENT)
        warm(store, SEGMENT)
        print(json.dumps(measure(store, "embedded", sizes, options.rounds)), flush=True)
        os._exit(0)
    with tempfile.TemporaryDirectory() as name:
        folder, me = Path(name), [sys.executable, __file__]
        rows: list[dict[str, Any]] = []
        with master(folder) as address:
            with running([*me, "--serve", address], folder / "owner.log") as owner:
                assert owner.stdout is not None
                line = owner.stdout.readline()
                while line and line.strip() != "ready":
                    line = owner.stdout.readline()
                if not line:
                    raise RuntimeError((folder / "owner.log").read_text()[-2000:])
                rows += measure(open_store(address, 0), "across", sizes, options.rounds)
        with master(folder) as address:
            alone = [*me, "--embedded", address, "--rounds", str(options.rounds)]
            told = subprocess.run(
                [*alone, "--sizes", options.sizes], stdout=subprocess.PIPE, text=True, check=False
            ).stdout
            rows += json.loads(told.splitlines()[-1])
    print(json.dumps({"peer": PACKAGE, "version": version(PACKAGE), "rows": rows}), flush=True)
    os._exit(0)  # its threads would go on


if __name__ == "__main__":
    main(sys.argv[1:])
