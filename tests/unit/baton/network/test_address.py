"""Tests that addresses have the form HOST:PORT, also with IPv6, and that members reach each other
over IPv6."""

import asyncio
import socket

import grpc
import pytest

from baton.core.credentials import ClusterCredentials
from baton.network.address import host_port, source_network
from baton.rpc.framed.server import FramedServer
from baton.rpc.server import build_server, listen


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:7"),
        ("::1", "[::1]:7"),
        ("a.b", "a.b:7"),
        ("fd00::1", "[fd00::1]:7"),
    ],
)
def test_formatted_address_can_be_split_into_host_and_port(host: str, address: str) -> None:
    assert host_port(host, 7) == address
    assert address.rpartition(":")[0].strip("[]") == host


def test_clients_are_grouped_by_ipv4_address_or_ipv6_site() -> None:
    assert [source_network(host) for host in ("10.0.0.1", "", "2001:db8::9", "x:y")] == [
        "10.0.0.1", "", "2001:db8::/64", "x:y",
    ]  # fmt: skip


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_members_reach_each_other_over_ipv6() -> None:
    server, lines = build_server(None), FramedServer(ClusterCredentials(), {})
    address = host_port("::1", await listen(server, "::1", 0))
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
    await server.stop(None)
    port = await lines.listen("::1", 0)
    _, writer = await asyncio.open_connection("::1", port)
    writer.close()
    await writer.wait_closed()
    await lines.close()
