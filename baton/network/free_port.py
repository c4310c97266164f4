"""Chooses ports for processes that will listen on them."""

import contextlib
import secrets
import socket
from pathlib import Path

LOWEST_CHOSEN_PORT = 15_000
PORT_ATTEMPTS = 100
"""Tries to find a free port below the ephemeral ones, before the kernel is asked for any."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nothing uses, for a process that will listen on it. It lies below the
    ports that the kernel gives to outgoing connections, one of which could take it before that
    process has started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    candidates = range(LOWEST_CHOSEN_PORT, _first_ephemeral_port())
    for _attempt in range(PORT_ATTEMPTS if candidates else 0):
        port = secrets.choice(candidates)
        with socket.socket(family) as listener, contextlib.suppress(OSError):
            listener.bind((host, port))
            return port
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def _first_ephemeral_port() -> int:
    """Return the lowest port that outgoing connections get; 0 if this is not told."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 0
