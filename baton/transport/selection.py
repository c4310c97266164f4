"""Opens the transports that this process can serve, and chooses the one that two processes use."""

from collections.abc import Sequence
from typing import cast

import structlog

from baton.clock import Clock
from baton.core.credentials import ClusterCredentials
from baton.errors import BatonError, Invalid
from baton.system.host import host_id
from baton.system.portability import describe_facilities, uses_linux
from baton.transport.base import Region, Transport
from baton.transport.cuda_ipc import CudaIpcTransport
from baton.transport.grpc_transport import GrpcTransport
from baton.transport.nixl import LOCAL_NAME, NixlTransport
from baton.transport.shm import ShmTransport

TRANSPORT_PREFERENCE = ("shm", "cuda_ipc", "nixl", "grpc")
LOCAL_ONLY = frozenset({"shm", "cuda_ipc", "memory", LOCAL_NAME})
"""Names of transports that work only within a host."""

LINUX_ONLY = frozenset({"nixl", "cuda_ipc"})
"""Names of transports whose libraries exist only for Linux."""

ONE_DEVICE = {"shm": "cpu", "cuda_ipc": "cuda"}
"""The transports that serve only one kind of memory, with its device."""

log = structlog.get_logger(__name__)


def preferred_transports(device: str) -> list[str]:
    """Return the names of the transports for memory of a device (``cpu`` or ``cuda``) that exist on
    this system, best first."""
    usable = [name for name in TRANSPORT_PREFERENCE if uses_linux() or name not in LINUX_ONLY]
    return [name for name in usable if ONE_DEVICE.get(name, device) == device]


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
    """Open transports and register the region with them. Return them by the names under which peers
    know them, best first.

    If ``names`` is empty, try all transports for this kind of memory, and log those that can't
    start. Otherwise open the named ones, and raise an error if one of them can't start. NIXL uses
    only the network devices ``nixl_interfaces``; if there are none, its name is ``nixl_local``."""
    kind = region.device.partition(":")[0]
    wanted = names or preferred_transports(kind)
    opened: dict[str, Transport] = {}
    _check_names(wanted, kind, nixl_interfaces)
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
            log.warning("transport_unavailable", transport=name, reason=str(error))
        else:
            opened[transport.name] = transport
    if not opened:
        raise Invalid(
            f"none of the transports {', '.join(wanted)} can serve this process's memory; the log "
            "has the reasons (transport_unavailable)",
            param="transports",
        )
    return opened


def _check_names(names: Sequence[str], kind: str, nixl_interfaces: Sequence[str]) -> None:
    """Raise Invalid if a transport is wanted that exists only for Linux, and Linux's own facilities
    are not used."""
    if uses_linux():
        return
    if wrong := next((name for name in names if name in LINUX_ONLY), ""):
        raise Invalid(
            f"transport {wrong} needs Linux, but this process uses {describe_facilities()}; "
            f"choose from {', '.join(preferred_transports(kind))}",
            param="transports",
        )
    if nixl_interfaces:
        raise Invalid(
            f"nixl_interfaces is {','.join(nixl_interfaces)}, but NIXL needs Linux, and this "
            f"process uses {describe_facilities()}: leave nixl_interfaces empty",
            param="nixl_interfaces",
        )


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
    if name == "cuda_ipc":
        return cast(Transport, CudaIpcTransport(owner, generation, clock, host_id()))
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
    raise Invalid(
        f"unknown transport {name!r}; known transports: {', '.join(TRANSPORT_PREFERENCE)}"
    )


def _new_nixl(owner: str, generation: int, clock: Clock, interfaces: Sequence[str]) -> Transport:
    transport = NixlTransport(owner, generation, clock, host_id(), tuple(interfaces))
    return cast(Transport, transport)


def choose_transport(
    source_transports: Sequence[str], reader_transports: Sequence[str], same_host: bool
) -> str:
    """Return the first of ``reader_transports`` (best first) that the source serves, too. Unless
    ``same_host`` is True, transports that work only within a host are left out. Raises Invalid if
    there is no common transport."""
    for name in reader_transports:
        if name in source_transports and (same_host or name not in LOCAL_ONLY):
            return name
    where = "on the same host" if same_host else "across hosts"
    raise Invalid(
        f"source and reader have no common transport that works {where}: the source has "
        f"{[*source_transports]}, the reader has {[*reader_transports]}"
    )
