"""A DNS server over UDP for the names of services, and of pods with host names."""

import asyncio
import struct
from collections.abc import Callable
from typing import cast

TTL_SECONDS = 2
TYPE_A, CLASS_IN = 1, 1
NO_SUCH_NAME = 3

Resolve = Callable[[str], list[str] | None]
"""Returns the addresses of a name; None if there is no such name."""


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
            return  # not a DNS query
        self._transport.sendto(reply, addr)


def answer(question: bytes, resolve: Resolve) -> bytes:
    """Return the response to one DNS query. It has the addresses of the name, no records if the
    query is not for IPv4 addresses, or the code NXDOMAIN if there is no such name."""
    (number, flags) = struct.unpack("!HH", question[:4])
    labels, place = [], 12
    while question[place]:
        length = question[place]
        labels.append(question[place + 1 : place + 1 + length].decode())
        place += 1 + length
    query = question[12 : place + 5]
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
    return head + query + records
