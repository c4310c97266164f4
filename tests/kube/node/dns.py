"""Names of services and of pods with host names, over UDP."""

import asyncio
import struct
from collections.abc import Callable
from typing import cast

from tests.kube.api import Api
from tests.kube.controllers.endpoints import backends, is_open
from tests.kube.kinds import SERVICE, Object

DOMAIN = "cluster.local"
TTL_SECONDS = 2
TYPE_A, CLASS_IN = 1, 1
NO_SUCH_NAME = 3

Resolve = Callable[[str], list[str] | None]
"""Addresses of a name; None if there is no such name."""


class Names:
    """Of a cluster: ``SERVICE.NAMESPACE.svc.cluster.local`` is the service's address, or those of
    its pods if it is headless; before it a pod's host name, where it has one."""

    def __init__(self, api: Api, node: str) -> None:
        self._api = api
        self._node = node

    def resolve(self, name: str) -> list[str] | None:
        parts = name.lower().rstrip(".").removesuffix(f".svc.{DOMAIN}").split(".")
        if not name.lower().rstrip(".").endswith(f".svc.{DOMAIN}"):
            return None
        if parts == ["kubernetes", "default"]:
            return [self._node]
        *host, service_name, namespace = parts if len(parts) > 1 else ["", ""]
        service = self._api.store.find(SERVICE, namespace, service_name)
        if service is None or len(host) > 1:
            return None
        if service["spec"].get("clusterIP") != "None":
            return [service["spec"]["clusterIP"]] if not host else None
        pods = [pod for pod in backends(self._api, service) if is_open(service, pod)]
        if host:
            pods = [pod for pod in pods if _host(pod) == (host[0], service_name)]
        return [pod["status"]["podIP"] for pod in pods] or None


def _host(pod: Object) -> tuple[str, str]:
    return pod["spec"].get("hostname", ""), pod["spec"].get("subdomain", "")


class NameServer(asyncio.DatagramProtocol):
    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        try:
            reply = answer(data, self._resolve)
        except (IndexError, struct.error, UnicodeDecodeError):
            return  # not a question
        self._transport.sendto(reply, addr)


def answer(question: bytes, resolve: Resolve) -> bytes:
    """To one question; what is asked besides addresses has an empty answer."""
    (number, flags) = struct.unpack("!HH", question[:4])
    labels, place = [], 12
    while question[place]:
        length = question[place]
        labels.append(question[place + 1 : place + 1 + length].decode())
        place += 1 + length
    asked = question[12 : place + 5]
    (kind,) = struct.unpack("!H", question[place + 1 : place + 3])
    found = resolve(".".join(labels))
    addresses = (found or []) if kind == TYPE_A else []
    code = 0 if found is not None else NO_SUCH_NAME
    head = struct.pack("!HHHHHH", number, 0x8580 | (flags & 0x0100) | code, 1, len(addresses), 0, 0)
    records = b"".join(
        struct.pack("!HHHIH", 0xC00C, TYPE_A, CLASS_IN, TTL_SECONDS, 4)
        + bytes(map(int, address.split(".")))
        for address in addresses
    )
    return head + asked + records
