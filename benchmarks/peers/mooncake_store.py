"""Measures Mooncake's store: put and get of one value with its Python API, over TCP on loopback.

    python benchmarks/peers/mooncake_store.py [--rounds N] [--sizes 4096,1048576,16777216]

Runs in its own environment and needs nothing of Baton's:

    python3.11 -m venv peer && peer/bin/pip install mooncake-transfer-engine-non-cuda

The package needs the system's libibverbs.so.1, libnuma.so.1 and libcurl.so.4, although only TCP is
used here.

In mode ``across``, one process owns the memory, and another process, which provides no memory, puts
and gets values. In mode ``embedded``, one process does both, and Mooncake copies locally instead of
sending. ``bytes`` measures put() and get(); ``zero_copy`` measures put_from() and get_into() with
registered buffers. Every value has its own key and is copied between addresses that are not in a
cache. It is got right after it was put, and then compared. Pages are touched beforehand. Mooncake
runs with its default settings; its environment variables (MC_TCP_SLICE_SIZE and the like) are
passed through. Its data ports listen on all interfaces while this runs, whatever
MC_TCP_BIND_ADDRESS says. Prints a table, and JSON as the last line.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import json
import mmap
import os
import signal
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
from types import FrameType
from typing import Any

PACKAGE = "mooncake-transfer-engine-non-cuda"
SEGMENT = 2 << 30
RING = 256 << 20
LOCAL_BUFFER = 256 << 20
LARGEST = RING // 2
WARM_UP = 5
START_SECONDS = 20.0
PR_SET_PDEATHSIG = 1

Row = dict[str, Any]


# The parent process starts the others and never loads Mooncake, whose signal handlers would
# interfere with terminating them.


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process that does not outlive this process; its stderr goes to ``log``."""
    environment = {"GLOG_minloglevel": "1", **os.environ}
    with (
        log.open("w") as file,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def failed(what: str, log: Path) -> RuntimeError:
    return RuntimeError(f"{what}; its log ends with:\n{log.read_text(errors='replace')[-2000:]}")


def lines(process: subprocess.Popen[str]) -> Iterator[Any]:
    """Yield the process's messages, without Mooncake's own output."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextlib.contextmanager
def master(folder: Path) -> Iterator[str]:
    """Run a mooncake_master; yield its address."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"this environment has no {PACKAGE}")
    binary = Path(spec.submodule_search_locations[0]) / "mooncake_master"
    port, metrics = free_ports(2)
    command = [
        str(binary),
        "-rpc_address=127.0.0.1",
        f"-rpc_port={port}",
        "-metrics_host=127.0.0.1",
        f"-metrics_port={metrics}",
        "-logtostderr",
    ]
    log = folder / "master.log"
    with running(command, log) as process:
        until = time.perf_counter() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                break
            if process.poll() is not None or time.perf_counter() > until:
                raise failed("mooncake_master did not start", log)
            threading.Event().wait(0.05)
        yield f"127.0.0.1:{port}"


def measured(mode: str, folder: Path, sizes: str, rounds: int) -> list[Row]:
    me = [sys.executable, str(Path(__file__).resolve()), "--sizes", sizes, "--rounds", str(rounds)]
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        me += ["--master", stack.enter_context(master(folder))]
        if mode == "across":
            log = folder / "owner.log"
            owner = stack.enter_context(running([*me, "--role", "owner"], log))
            if next(lines(owner), None) is None:
                raise failed("the process that provides the store's memory did not start", log)
        log = folder / "client.log"
        client = stack.enter_context(running([*me, "--role", mode], log))
        rows = []
        for row in lines(client):
            rows.append(row)
            print(shown(row), file=sys.stderr, flush=True)
        if client.wait():
            raise failed(f"the client for mode {mode} exited with code {client.returncode}", log)
        return rows


def shown(row: Row) -> str:
    return (
        f"{row['mode']:10}{row['api']:11}{row['op']:5}{row['size_bytes']:>10}"
        f"{row['median_seconds'] * 1e3:>11.3f}{row['p90_seconds'] * 1e3:>10.3f}"
        f"{row['gigabytes_per_second']:>8.2f}"
    )


# The child processes, each of which opens one store.


def open_store(address: str, segment: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    settings = ("127.0.0.1", "P2PHANDSHAKE", segment, LOCAL_BUFFER, "tcp", "", address)
    check(store.setup(*settings), "setup")
    return store


def check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"Mooncake's {what} returned {code}; 0 means success")


def remove(store: Any, keys: list[str]) -> None:
    """Remove keys with force, since a plain remove is rejected while the lease of a get lasts."""
    for key in keys:
        check(store.remove(key, True), f"remove of {key}")
    keys.clear()


def touch(store: Any) -> None:
    """Touch the pages of the segment: fill it up to the level at which eviction would begin, and
    empty it again."""
    value, keys = os.urandom(16 << 20), []
    for number in range(SEGMENT * 7 // 8 // len(value)):
        keys.append(f"touch-{number}")
        check(store.put(keys[-1], value), f"put of {keys[-1]}")
    remove(store, keys)


def registered(store: Any) -> tuple[mmap.mmap, int]:
    """Return memory that is registered with the store, and its address."""
    memory = mmap.mmap(-1, RING)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    check(store.register_buffer(address, RING), "register_buffer")
    return memory, address


def timed(action: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    value = action(*arguments)
    return time.perf_counter() - began, value


def measure(store: Any, mode: str, sizes: list[int], rounds: int) -> Iterator[Row]:
    source, source_address = registered(store)
    target, target_address = registered(store)
    source[:] = os.urandom(RING)
    for size in sizes:
        places = RING // size
        starts = [place * size for place in range(min(places, WARM_UP + rounds))]
        values = [source[start : start + size] for start in starts]
        for api in ("bytes", "zero_copy"):
            target[:] = bytes(RING)  # so that the right value is not in the buffer already
            times: dict[str, list[float]] = {"put": [], "get": []}
            keys: list[str] = []
            for turn in range(WARM_UP + rounds):
                if (len(keys) + 1) * size > SEGMENT // 2:
                    remove(store, keys)
                key = f"{mode}-{size}-{api}-{turn}"
                keys.append(key)
                lap, place = divmod(turn, places)
                if api == "bytes":
                    put_seconds, code = timed(store.put, key, values[place])
                    get_seconds, got = timed(store.get, key)
                else:
                    # In each lap, write another value than in the last one.
                    start = (place + lap) % places * size
                    from_, to = source_address + starts[place], target_address + start
                    put_seconds, code = timed(store.put_from, key, from_, size)
                    get_seconds, count = timed(store.get_into, key, to, size)
                    got = target[start : start + size] if count == size else b""
                check(code, f"put of {key}")
                if got != values[place]:
                    raise RuntimeError(f"get() returned a wrong value for {key}")
                if turn >= WARM_UP:
                    times["put"].append(put_seconds)
                    times["get"].append(get_seconds)
            remove(store, keys)
            for op, seconds in times.items():
                median = statistics.median(seconds)
                yield {
                    "mode": mode,
                    "api": api,
                    "op": op,
                    "size_bytes": size,
                    "median_seconds": median,
                    "p90_seconds": statistics.quantiles(seconds, n=10)[8],
                    "gigabytes_per_second": size / median / 1e9,
                }


def act(role: str, address: str, sizes: list[int], rounds: int) -> None:
    store = open_store(address, 0 if role == "across" else SEGMENT)
    if role != "across":
        touch(store)
    if role == "owner":
        print("{}", flush=True)
        sys.stdin.read()  # wait until the parent is done
    else:
        for row in measure(store, role, sizes, rounds):
            print(json.dumps(row), flush=True)
    os._exit(0)  # don't wait for the store's threads


def end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--sizes", default="4096,1048576,16777216")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--master", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes = [int(size) for size in options.sizes.split(",")]
    if not all(0 < size <= LARGEST for size in sizes) or options.rounds < 2:
        parser.error(f"sizes must be from 1 to {LARGEST}, and rounds at least 2")
    if options.role:
        act(options.role, options.master, sizes, options.rounds)
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for mode in ("across", "embedded"):
            rows += measured(mode, Path(name) / mode, options.sizes, options.rounds)
    print(f"{'mode':10}{'api':11}{'op':5}{'bytes':>10}{'median ms':>11}{'p90 ms':>10}{'GB/s':>8}")
    for row in rows:
        print(shown(row))
    print(json.dumps({"peer": PACKAGE, "version": version(PACKAGE), "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
