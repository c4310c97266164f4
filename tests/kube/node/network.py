"""One bridge on which every pod has an address, and the node the addresses of all services."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

FIRST, LAST = 90, 119
"""Of the second numbers of 10.x.0.0/16 that clusters of this machine share among them."""

BRIDGE = "bkube"
HARDWARE = "02:62:6b:75:62"
"""A bridge without an address of its own has its lowest member's. With each pod that comes or goes
it may have another, and until pods notice, for half a minute, what they send it is lost."""

INTERFACES = count()
"""Of this process: the kernel takes seconds to forget one, so no name is used twice."""


def run(*command: str, given: str = "") -> str:
    """Raises RuntimeError with what it said."""
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}\n{given}")
    return done.stdout


def why_not() -> str:
    """Why this machine can't have such nodes; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    command = ["unshare", "--net", "--mount", "ip", "link", "add", "x", "type", "bridge"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"util-linux or iproute2 is missing: {error}"
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else ""


class Network:
    """``prefix`` like 10.91. The node is ``gateway``; services are at 10.91.200.x."""

    def __init__(self, number: int) -> None:
        self.prefix = f"10.{number}"
        self.gateway = f"{self.prefix}.0.1"
        self.service_subnet = f"{self.prefix}.200"
        self.bridge = f"{BRIDGE}{number}"
        self._numbers = count(2)

    def attach(self, pid: int) -> str:
        """An interface for the namespace of that process; returns its address."""
        number = next(self._numbers)  # threads call this
        address = f"{self.prefix}.{number // 250}.{number % 250 + 2}"
        outside = f"bk{os.getpid():x}v{next(INTERFACES):x}"
        run("ip", "-batch", "-", given=_outside(outside, self.bridge, pid))
        inside = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-"]
        run(*inside, given=_inside(address, self.gateway))
        return address

    def add_address(self, address: str) -> None:
        run("ip", "addr", "add", f"{address}/32", "dev", self.bridge)

    def drop_address(self, address: str) -> None:
        run("ip", "addr", "del", f"{address}/32", "dev", self.bridge)


def _outside(name: str, bridge: str, pid: int) -> str:
    return (
        f"link add {name} type veth peer name eth0 netns {pid}\n"
        f"link set {name} master {bridge} up\n"
    )


def _inside(address: str, gateway: str) -> str:
    return (
        f"addr add {address}/16 dev eth0\nlink set eth0 up\nlink set lo up\n"
        f"route add default via {gateway}\n"
    )


@contextmanager
def network() -> Iterator[Network]:
    """The first number that is free; the bridge says whose it is, so that what a killed process
    has left is swept away by the next one."""
    _sweep()
    for number in range(FIRST, LAST + 1):
        made = Network(number)
        try:
            run("ip", "link", "add", made.bridge, "type", "bridge")
        except RuntimeError:
            continue
        try:
            run("ip", "link", "set", made.bridge, "alias", f"pid {os.getpid()}")
            run("ip", "link", "set", made.bridge, "address", f"{HARDWARE}:{number:02x}")
            run("ip", "addr", "add", f"{made.gateway}/16", "dev", made.bridge)
            run("ip", "link", "set", made.bridge, "up")
            yield made
        finally:
            subprocess.run(["ip", "link", "del", made.bridge], capture_output=True)
        return
    raise RuntimeError(f"no free network: {BRIDGE}{FIRST} to {BRIDGE}{LAST} all exist")


def _sweep() -> None:
    for folder in Path("/sys/class/net").glob(f"{BRIDGE}[0-9]*"):
        try:
            owner = (folder / "ifalias").read_text(encoding="utf-8").split()
        except OSError:
            continue
        if len(owner) == 2 and not Path(f"/proc/{owner[1]}").exists():
            subprocess.run(["ip", "link", "del", folder.name], capture_output=True)
