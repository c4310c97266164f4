"""Tests the HTTP server's TLS over real sockets."""

import asyncio
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.errors import Invalid
from baton.network.pinned_tls import pinned_tls_context
from router.http.tls import ReloadingCertificate
from tests import certificates
from tests.http_server_bench import CLOCK, CLOSING_GET, GET, LIMITS, bench, on_uvloop, status


@on_uvloop
async def test_replaced_certificate_is_reloaded(tmp_path: Path) -> None:
    files = tmp_path / "one.pem", tmp_path / "one.key"
    files[0].write_text(certificates.ONE_CERTIFICATE)
    files[1].write_text(certificates.ONE_KEY)
    other = tmp_path / "two.pem"
    other.write_text(certificates.TWO_CERTIFICATE)
    certificate = ReloadingCertificate(str(files[0]), str(files[1]), CLOCK)
    async with bench(tls=certificate.context) as running:

        async def ask(trusted: Path) -> int:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", running.port, ssl=pinned_tls_context(str(trusted))
            )
            writer.write(CLOSING_GET)
            answer = await reader.read()
            writer.close()
            return status(answer)

        assert await ask(files[0]) == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(other)
        files[0].write_text(certificates.TWO_CERTIFICATE)
        certificate.refresh()  # the key file is still the old one, so that nothing is reloaded yet
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(other)
        files[1].write_text(certificates.TWO_KEY)
        certificate.refresh()
        assert await ask(other) == 200


@on_uvloop
async def test_failed_handshake_ends_its_connection_and_no_other(tmp_path: Path) -> None:
    files = tmp_path / "one.pem", tmp_path / "one.key"
    files[0].write_text(certificates.ONE_CERTIFICATE)
    files[1].write_text(certificates.ONE_KEY)
    certificate = ReloadingCertificate(str(files[0]), str(files[1]), CLOCK)
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    limits = replace(LIMITS, header_timeout_seconds=0.2)
    async with bench(limits, certificate.context) as running:
        assert status(await running.ask(GET)) == 0
        assert await running.ask(b"") == b"", "a client that begins no handshake is disconnected"
        assert running.requests == [] and errors == []


@on_uvloop
async def test_unfinished_handshakes_count_as_connections(tmp_path: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    (tmp_path / "both.pem").write_text(certificates.ONE_CERTIFICATE + certificates.ONE_KEY)
    context.load_cert_chain(tmp_path / "both.pem")
    async with bench(replace(LIMITS, max_connections=8), context) as running:
        crowd = [await running.connect("127.0.0.2") for _ in range(20)]
        async with asyncio.timeout(60):
            assert [await reader.read() for reader, _ in crowd[:12]] == [b""] * 12
        assert running.refusals == ["connections"] * 12
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", running.port, ssl=pinned_tls_context(str(tmp_path / "both.pem"))
        )
        writer.write(CLOSING_GET)
        assert status(await reader.read()) == 200
        writer.close()
        assert running.refusals == ["connections"] * 13


def test_invalid_certificate_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("nonsense")
    with pytest.raises(Invalid, match="tls_certificate"):
        ReloadingCertificate(str(tmp_path / "a.pem"), str(tmp_path / "a.pem"), CLOCK)
