"""Two network namespaces that are joined by a link of limited speed."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from baton.errors import Invalid

SOURCE_ADDRESS, READER_ADDRESS = "10.213.7.1", "10.213.7.2"
DEVICE = "veth0"
MIN_BURST_BYTES = 64 * 1024
BURST_SECONDS = 0.004
"""The link may send what it could have sent in this time at once: as long as a tick of a kernel
with 250 Hz."""


@contextmanager
def joined_namespaces() -> Iterator[tuple[str, str]]:
    """Yield the names of two network namespaces, for the source and for the reader, that are joined
    by a veth pair. Raises Invalid if they can't be made."""
    names = f"baton-source-{os.getpid()}", f"baton-reader-{os.getpid()}"
    try:
        for name in names:
            _shell(f"ip netns add {name}")
        _shell(f"ip link add {DEVICE} netns {names[0]} type veth peer name {DEVICE} "
               f"netns {names[1]}")  # fmt: skip
        for name, address in zip(names, (SOURCE_ADDRESS, READER_ADDRESS), strict=True):
            _shell(f"ip -n {name} address add {address}/24 dev {DEVICE}")
            _shell(f"ip -n {name} link set lo up")
            _shell(f"ip -n {name} link set {DEVICE} up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def limit_rate(names: tuple[str, str], gigabytes_per_second: float) -> None:
    """Limit the link between the namespaces in both directions."""
    bits = int(gigabytes_per_second * 8e9)
    burst = max(MIN_BURST_BYTES, int(gigabytes_per_second * 1e9 * BURST_SECONDS))
    for name in names:
        _shell(
            f"tc -n {name} qdisc replace dev {DEVICE} root tbf rate {bits}bit burst {burst} "
            "latency 50ms"
        )


def _shell(command: str) -> None:
    try:
        subprocess.run(command.split(), check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise Invalid("ip and tc are missing: install iproute2") from error
    except subprocess.CalledProcessError as error:
        raise Invalid(f"{command!r} failed (it needs root): {error.stderr.strip()}") from error
