"""Tests TLS between members, over gRPC and framed connections: both sides must present a
certificate issued by the cluster's authority."""

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.clock import SystemClock
from baton.config import load_settings
from baton.core.credentials import ClusterCredentials
from baton.core.pool_plan import PoolPlan
from baton.errors import BatonError, Invalid, Unauthorized, Unavailable
from baton.rpc.conductor_client import fetch_pool_plan
from baton.rpc.conductor_service import add_conductor_service
from baton.rpc.framed import server as framed_server
from baton.rpc.framed.client import open_framed_connection
from baton.rpc.framed.connection import FramedConnection
from baton.rpc.framed.server import FramedServer
from baton.rpc.server import build_server, listen
from baton.transport.base import Region, TransferRange, TransferState
from baton.transport.grpc_transport import GrpcTransport
from tests.certificates import (
    AUTHORITY,
    MEMBER_CERTIFICATE,
    MEMBER_KEY,
    OTHER_CERTIFICATE,
    OTHER_KEY,
    STRANGER_CERTIFICATE,
    STRANGER_KEY,
    STRANGERS_AUTHORITY,
)

MEMBER = (MEMBER_CERTIFICATE, MEMBER_KEY, AUTHORITY)
OTHER = (OTHER_CERTIFICATE, OTHER_KEY, AUTHORITY)
STRANGER = (STRANGER_CERTIFICATE, STRANGER_KEY, STRANGERS_AUTHORITY)
NAMES = ("certificate.pem", "key.pem", "authority.pem")


def trust(
    folder: Path, files: tuple[str, str, str], secret: str | None = None
) -> ClusterCredentials:
    folder.mkdir(exist_ok=True)
    paths = [folder / name for name in NAMES]
    for path, text in zip(paths, files, strict=True):
        path.write_text(text)
    return ClusterCredentials(secret, *map(str, paths))


class Core:
    """A conductor whose answers are empty; it is also a framed service that ignores messages."""

    def __init__(self, line: FramedConnection | None = None) -> None: ...

    def describe(self) -> tuple[list[str], str]:
        return [], ""

    def pool_plan(self, model: str = "") -> PoolPlan | None:
        return None

    def on_message(self, payload: bytes) -> None: ...

    def on_lost(self) -> None: ...


@asynccontextmanager
async def grpc_server(trusted: ClusterCredentials) -> AsyncIterator[str]:
    server = build_server(trusted)
    add_conductor_service(server, Core())  # type: ignore[arg-type]
    port = await listen(server, "127.0.0.1", 0, trusted)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def line_server_at(trusted: ClusterCredentials) -> AsyncIterator[tuple[FramedServer, str]]:
    server = FramedServer(trusted, {"core": Core})
    port = await server.listen("127.0.0.1", 0)
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.close()


@asynccontextmanager
async def line_server_only(trusted: ClusterCredentials) -> AsyncIterator[str]:
    async with line_server_at(trusted) as (_, address):
        yield address


async def ask_grpc(address: str, trusted: ClusterCredentials) -> None:
    await fetch_pool_plan(address, trusted, timeout_seconds=5.0)


async def ask_line(address: str, trusted: ClusterCredentials) -> None:
    (await open_framed_connection(address, "core", trusted, lambda payload: None, 5.0)).close()


both = pytest.mark.parametrize(
    ("serve", "ask"), [(grpc_server, ask_grpc), (line_server_only, ask_line)], ids=["grpc", "line"]
)


@both
async def test_members_authenticate_each_other(serve, ask, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    trusted = trust(tmp_path, MEMBER)
    async with serve(trusted) as address:
        await ask(address, trusted)


@both
async def test_secret_is_required_in_addition_to_certificates(serve, ask, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    trusted = trust(tmp_path, MEMBER, "hush")
    async with serve(trusted) as address:
        await ask(address, trusted)
        with pytest.raises(Unauthorized):
            await ask(address, replace(trusted, secret=None))


@both
async def test_clients_without_a_certificate_are_rejected(serve, ask, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A client is rejected if it uses no TLS, or if another authority issued its certificate,
    whether or not the client itself trusts the members' authority."""
    members, strangers = trust(tmp_path / "m", MEMBER), trust(tmp_path / "s", STRANGER)
    async with serve(members) as address:
        for each in (
            strangers,
            replace(strangers, authority=members.authority),
            ClusterCredentials(),
        ):
            with pytest.raises(Unavailable):
                await ask(address, each)


@both
async def test_members_reject_other_servers(serve, ask, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A member rejects a server whose certificate was issued by another authority, a server whose
    certificate the cluster's authority issued for another name, and a server without TLS."""
    members = trust(tmp_path / "m", MEMBER)
    for folder, files in (("s", STRANGER), ("o", OTHER)):
        async with serve(trust(tmp_path / folder, files)) as address:
            with pytest.raises(Unavailable):
                await ask(address, members)
    async with serve(ClusterCredentials()) as address:
        with pytest.raises(Unavailable):
            await ask(address, members)


@both
async def test_replaced_certificates_apply_to_new_connections(serve, ask, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """While the certificate and the key in the files don't match, the server keeps the old ones."""
    served, strangers = trust(tmp_path / "m", STRANGER), trust(tmp_path / "s", STRANGER)
    members = trust(tmp_path / "new", MEMBER)
    async with serve(served) as address:
        await ask(address, strangers)
        trust(tmp_path / "m", (STRANGER_CERTIFICATE, MEMBER_KEY, STRANGERS_AUTHORITY))
        await ask(address, strangers)
        trust(tmp_path / "m", MEMBER)
        await ask(address, members)
        with pytest.raises(Unavailable):
            await ask(address, strangers)


@both
async def test_missing_certificate_files_are_reported(serve, ask, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    members = trust(tmp_path, MEMBER)
    lost = replace(members, key=str(tmp_path / "nowhere.pem"))
    with pytest.raises(Invalid, match=r"rpc_tls_key .*nowhere\.pem"):
        async with serve(lost):
            pass
    async with serve(members) as address:
        with pytest.raises(BatonError, match=r"nowhere\.pem"):
            await ask(address, lost)


async def test_client_without_tls_is_disconnected(tmp_path: Path) -> None:
    async with line_server_only(trust(tmp_path, MEMBER)) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert len(await reader.read()) < 100
        writer.close()


def test_all_three_tls_settings_are_required_together(tmp_path: Path) -> None:
    members = trust(tmp_path, MEMBER)
    with pytest.raises(Invalid, match="go together"):
        load_settings(rpc_tls_key=members.key)
    settings = load_settings(
        grpc_host="0.0.0.0",
        rpc_tls_certificate=members.certificate,
        rpc_tls_key=members.key,
        rpc_tls_ca=members.authority,
    )
    assert settings.trust == members


def read_64_bytes(source: GrpcTransport, reader: GrpcTransport) -> TransferState:
    """Read 64 bytes of ``source`` through ``reader``; return the transfer's final state."""
    memories = [ctypes.create_string_buffer(bytes([fill]) * 64, 64) for fill in (1, 2)]
    for transport, memory in zip((source, reader), memories, strict=True):
        transport.register(Region(ctypes.addressof(memory), 64, "cpu"))
    transfer = reader.prepare(reader.connect(source.export()), [TransferRange(0, 0, 64)], 5.0)
    reader.post(transfer)
    while reader.poll(transfer) is TransferState.PENDING:
        threading.Event().wait(0.002)
    assert (memories[1].raw == memories[0].raw) is (transfer.state is TransferState.DONE)
    reader.close()
    source.close()
    return transfer.state


async def test_incomplete_tls_handshakes_do_not_block_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection counts as unauthenticated from the moment it is opened, even before its TLS
    handshake. Beyond the limit, the oldest unauthenticated connection is closed, so that members
    can still connect."""
    monkeypatch.setattr(framed_server, "MAX_UNAUTHENTICATED", 2)
    trusted = trust(tmp_path, MEMBER)
    async with asyncio.timeout(20), line_server_at(trusted) as (server, address):
        host, _, port = address.rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        for reader, _ in idle[:3]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        assert len(server.unauthenticated) == 2
        await ask_line(address, trusted)
        for _, writer in idle:
            writer.close()


def test_kv_is_transferred_only_between_members(tmp_path: Path) -> None:
    members, strangers = trust(tmp_path / "m", MEMBER), trust(tmp_path / "s", STRANGER)

    def transport(trusted: ClusterCredentials) -> GrpcTransport:
        return GrpcTransport("owner", 1, SystemClock(), "host", trust=trusted)

    assert read_64_bytes(transport(members), transport(members)) is TransferState.DONE
    assert read_64_bytes(transport(members), transport(strangers)) is TransferState.FAILED
    outsider = transport(ClusterCredentials())
    assert read_64_bytes(transport(members), outsider) is TransferState.FAILED
