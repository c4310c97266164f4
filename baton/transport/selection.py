"""Which transports this process can serve, and which one a pair uses."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import structlog

from baton.clock import Clock
from baton.core.credentials import ClusterCredentials
from baton.errors import BatonError, Invalid
from baton.transport.base import Region, Transport
from baton.transport.grpc_transport import GrpcTransport
from baton.transport.nixl import LOCAL_NAME, NixlTransport
from baton.transport.shm import ShmTransport

TRANSPORT_PREFERENCE = ("shm", "nixl", "grpc")
LOCAL_ONLY = frozenset({"shm", "memory", LOCAL_NAME})
"""Names of transports whose both sides must be on one host."""

log = structlog.get_logger(__name__)


def host_id() -> str:
    """Equal in two processes iff they may map each other's memory: one boot of one kernel,
    and one namespace of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def open_transports(
    names: Sequence[str],
    *,
    owner: str,
    generation: int,
    region: Region,
    clock: Clock,
    listen_host: str,
    advertise_host: str | None = None,
    trust: ClusterCredentials | str | None = None,
    nixl_interfaces: Sequence[str] = (),
) -> dict[str, Transport]:
    """Opened and registered, best first, by the names that peers know them by. ``names`` is empty
    for all that can start; one that is named and can't start is an error, one that isn't is left
    out with a log line. NIXL uses ``nixl_interfaces`` and no other network device; without one it
    is called ``nixl_local``."""
    wanted = names or [
        name for name in TRANSPORT_PREFERENCE if region.device == "cpu" or name != "shm"
    ]
    opened: dict[str, Transport] = {}
    for name in wanted:
        transport = (
            _new_nixl(owner, generation, clock, nixl_interfaces)
            if name == "nixl"
            else _new(name, owner, generation, clock, listen_host, advertise_host, trust)
        )
        try:
            transport.register(region)
        except BatonError as error:
            if names:
                raise
            log.warning("transport_left_out", transport=name, reason=str(error))
        else:
            opened[transport.name] = transport
    if not opened:
        raise Invalid("no transport can serve this worker's memory", param="transports")
    return opened


def _new(
    name: str,
    owner: str,
    generation: int,
    clock: Clock,
    listen_host: str,
    advertise_host: str | None,
    trust: ClusterCredentials | str | None,
) -> Transport:
    if name == "shm":
        return cast(Transport, ShmTransport(owner, generation, clock, host_id()))
    if name == "grpc":
        transport = GrpcTransport(
            owner,
            generation,
            clock,
            host_id(),
            listen_host=listen_host,
            advertise_host=advertise_host,
            trust=trust,
        )
        return cast(Transport, transport)
    raise Invalid(f"unknown transport {name!r}; there are {', '.join(TRANSPORT_PREFERENCE)}")


def _new_nixl(owner: str, generation: int, clock: Clock, interfaces: Sequence[str]) -> Transport:
    transport = NixlTransport(owner, generation, clock, host_id(), tuple(interfaces))
    return cast(Transport, transport)


def choose_transport(ours: Sequence[str], readers: Sequence[str], same_host: bool) -> str:
    """The reader's best that the source serves too. Raises Invalid when there is none."""
    for name in readers:
        if name in ours and (same_host or name not in LOCAL_ONLY):
            return name
    raise Invalid(f"no common transport: source has {[*ours]}, reader {[*readers]}")
