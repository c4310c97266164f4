"""Simulated hosts on one machine, whose links can be cut or slowed down.

Each host is a network namespace on a bridge, and its processes run in their own PID namespace.
Needs root and iproute2.
"""

import ctypes
import fcntl
import os
import selectors
import struct
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from testkit.machine import SYSTEM_CLOCK

SUBNET, WIRE_SUBNET = "10.77.0", "10.78.0"
BRIDGE_HARDWARE = "02:62:74:62:72:00"
"""The bridge's MAC address. By default, it would change with the interfaces on the bridge."""

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
WIRE_MTU = 32_000
"""The MTU in bytes. With packets this large, a wire simulated in Python carries 1 Gbit/s."""

QUEUE_BYTES = 4 * 2**20
"""The bytes that may wait in the queue of a slow link; further packets are dropped, as in a
switch."""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class NetworkNamespaces:
    """The simulated hosts. The host with index i in ``names`` has the address ``10.77.0.(i + 2)``;
    this process has ``10.77.0.1``."""

    def __init__(self, names: Sequence[str]) -> None:
        self._prefix = f"bt{os.getpid() % 10_000}"
        self._names = list(names)

    @contextmanager
    def up(self) -> Iterator["NetworkNamespaces"]:
        bridge = f"{self._prefix}br"
        run("ip", "link", "add", bridge, "type", "bridge")
        try:
            run("ip", "link", "set", bridge, "address", BRIDGE_HARDWARE)
            run("ip", "addr", "add", f"{SUBNET}.1/24", "dev", bridge)
            run("ip", "link", "set", bridge, "up")
            for number, name in enumerate(self._names):
                self._add(number, name, bridge)
            yield self
        finally:
            for name in self._names:
                subprocess.run(["ip", "netns", "del", self.namespace(name)], capture_output=True)
            subprocess.run(["ip", "link", "del", bridge], capture_output=True)

    def _add(self, number: int, name: str, bridge: str) -> None:
        space, outside = self.namespace(name), f"{self._prefix}v{number}"
        run("ip", "netns", "add", space)
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "link", "set", outside, "master", bridge, "up")
        run("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        run("ip", "-n", space, "link", "set", "eth0", "up")
        run("ip", "-n", space, "link", "set", "lo", "up")

    def namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def address(self, name: str) -> str:
        return f"{SUBNET}.{self._names.index(name) + 2}"

    def command(self, name: str, *command: str) -> list[str]:
        """Return the command line that runs ``command`` on the host ``name``, in a process that
        dies with its parent."""
        isolated = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command]
        return ["ip", "netns", "exec", self.namespace(name), *isolated]

    # -- faults -----------------------------------------------------------------------------

    def cut_link(self, one: str, other: str) -> None:
        """Cut the link between these two hosts only."""
        for here, there in ((one, other), (other, one)):
            route = ["route", "add", "blackhole", f"{self.address(there)}/32"]
            run("ip", "-n", self.namespace(here), *route)

    def restore_link(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            route = ["route", "del", "blackhole", f"{self.address(there)}/32"]
            run("ip", "-n", self.namespace(here), *route)

    def isolate(self, name: str) -> None:
        """Cut all links of a host."""
        run("ip", "-n", self.namespace(name), "link", "set", "eth0", "down")

    def reconnect(self, name: str) -> None:
        run("ip", "-n", self.namespace(name), "link", "set", "eth0", "up")

    @contextmanager
    def slow_link(
        self, one: str, other: str, bits_per_second: float, delay: float
    ) -> Iterator[None]:
        """While the block runs, route all packets between two hosts over a link of
        ``bits_per_second``, with ``delay`` seconds in each direction."""
        ends = [self._tunnel(one, 1), self._tunnel(other, 2)]
        for here, there, number in ((one, other, 1), (other, one, 2)):
            space = self.namespace(here)
            run("ip", "-n", space, "addr", "add", f"{WIRE_SUBNET}.{number}/30", "dev", "wire")
            run("ip", "-n", space, "link", "set", "wire", "mtu", str(WIRE_MTU), "up")
            source = ["src", self.address(here)]
            run(
                "ip",
                "-n",
                space,
                "route",
                "add",
                f"{self.address(there)}/32",
                "dev",
                "wire",
                *source,
            )
        wire = SlowLink(ends[0], ends[1], bits_per_second, delay)
        wire.start()
        try:
            yield
        finally:
            wire.stop()
            for end in ends:
                os.close(end)

    def _tunnel(self, name: str, number: int) -> int:
        """Create a TUN device called ``wire`` on the host ``name``, and return its file
        descriptor, through which this process reads and writes packets."""
        made: list[int] = []

        def make() -> None:  # runs in a new thread, since setns changes the calling thread only
            with Path(f"/run/netns/{self.namespace(name)}").open() as space:
                if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TUN | IFF_NO_PI))
            made.append(device)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return made[0]


class SlowLink(threading.Thread):
    """Carries packets between two tunnels with a limited speed and a delay per direction."""

    def __init__(self, one: int, other: int, bits_per_second: float, delay: float) -> None:
        super().__init__(daemon=True)
        self._to = {one: other, other: one}
        self._rate = bits_per_second / 8
        self._delay = delay
        self._free_at = {one: 0.0, other: 0.0}
        self._waiting: dict[int, deque[tuple[float, bytes]]] = {one: deque(), other: deque()}
        self._queued = {one: 0, other: 0}
        self._over = threading.Event()

    def stop(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        for end in self._to:
            selector.register(end, selectors.EVENT_READ)
        while not self._over.is_set():
            soonest = min((q[0][0] for q in self._waiting.values() if q), default=0.05 + self._now)
            for key, _ in selector.select(max(min(soonest - self._now, 0.05), 0.0)):
                self._take(int(key.fd))
            for end in self._to:
                self._deliver(end)

    @property
    def _now(self) -> float:
        return SYSTEM_CLOCK()

    def _take(self, end: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(end, 65_536)
            except BlockingIOError:
                return
            if self._queued[end] + len(packet) > QUEUE_BYTES:
                continue
            self._queued[end] += len(packet)
            sent = max(self._free_at[end], self._now) + len(packet) / self._rate
            self._free_at[end] = sent
            self._waiting[end].append((sent + self._delay, packet))

    def _deliver(self, end: int) -> None:
        waiting = self._waiting[end]
        while waiting and waiting[0][0] <= self._now:
            _, packet = waiting.popleft()
            self._queued[end] -= len(packet)
            try:
                os.write(self._to[end], packet)
            except OSError:
                continue  # the device is full or down, so the packet is dropped
