"""The pod network. Each pod has an address on a Linux bridge, and this machine has the addresses of
all services."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

FIRST, LAST = 90, 119
"""The range of x in 10.x.0.0/16 from which each cluster on this machine takes a free one."""

BRIDGE = "bkube"
HARDWARE = "02:62:6b:75:62"
"""The prefix of the bridge's fixed MAC address. By default, a bridge has the lowest MAC address of
its ports, which may change with each new pod. Packets from other pods to the bridge would then be
lost until those pods notice the change, which may take half a minute."""

INTERFACES = count()
"""Numbers for interface names. The kernel takes seconds to forget an interface, so no name is used
twice."""


def run(*command: str, given: str = "") -> str:
    """Run a command with ``given`` as its input; return its output. Raises RuntimeError with the
    command's error output if it fails."""
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}\n{given}")
    return done.stdout


def missing_requirement() -> str:
    """Return why this machine can't run nodes with network namespaces, or "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    command = ["unshare", "--net", "--mount", "ip", "link", "add", "x", "type", "bridge"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"util-linux or iproute2 is missing: {error}"
    return f"cannot create Linux namespaces: {done.stderr.strip()}" if done.returncode else ""


class Network:
    """A pod network with a ``prefix`` like 10.91. ``gateway`` is this machine's address in the
    network; services have the addresses 10.91.200.x."""

    def __init__(self, number: int) -> None:
        self.prefix = f"10.{number}"
        self.gateway = f"{self.prefix}.0.1"
        self.service_subnet = f"{self.prefix}.200"
        self.bridge = f"{BRIDGE}{number}"
        self._numbers = count(2)

    def attach(self, pid: int) -> str:
        """Create an interface in the network namespace of a process; return its address."""
        number = next(self._numbers)  # called from several threads
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
    """Create the network 10.N with the smallest N, from FIRST to LAST, whose bridge does not exist
    yet. The bridge's alias contains the id of the process that owns it, so that later runs can
    remove the bridges of killed processes. Raises RuntimeError if all the bridges exist."""
    _sweep()
    for number in range(FIRST, LAST + 1):
        created = Network(number)
        try:
            run("ip", "link", "add", created.bridge, "type", "bridge")
        except RuntimeError:
            continue
        try:
            run("ip", "link", "set", created.bridge, "alias", f"pid {os.getpid()}")
            run("ip", "link", "set", created.bridge, "address", f"{HARDWARE}:{number:02x}")
            run("ip", "addr", "add", f"{created.gateway}/16", "dev", created.bridge)
            run("ip", "link", "set", created.bridge, "up")
            yield created
        finally:
            subprocess.run(["ip", "link", "del", created.bridge], capture_output=True)
        return
    raise RuntimeError(
        f"no pod network is free: all bridges from {BRIDGE}{FIRST} to {BRIDGE}{LAST} exist"
    )


def _sweep() -> None:
    for folder in Path("/sys/class/net").glob(f"{BRIDGE}[0-9]*"):
        try:
            owner = (folder / "ifalias").read_text(encoding="utf-8").split()
        except OSError:
            continue
        if len(owner) == 2 and not Path(f"/proc/{owner[1]}").exists():
            subprocess.run(["ip", "link", "del", folder.name], capture_output=True)
