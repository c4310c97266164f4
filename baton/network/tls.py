"""Mutual TLS between members, for gRPC and framed connections, with certificates of the cluster's
authority.

Members come and go under any address, so certificates contain no addresses: they all have the DNS
name ``baton``. Files are read again when they have changed; new connections use the new files,
existing connections stay as they are. Each handshake checks the files for changes, since members
connect rarely. The router polls its public certificate instead (:mod:`router.http.tls`).
"""

import ssl
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc
import structlog

from baton.core.credentials import ClusterCredentials
from baton.errors import Invalid

TLS_NAME = "baton"
"""The subject alternative name (DNS) that every certificate must have."""

log = structlog.get_logger(__name__)

FileStamps = tuple[int, ...]
"""Modification times and inodes of files, which change when the files change."""


def file_stamps(*paths: str) -> FileStamps:
    """Return the modification time and the inode of each file. Raises OSError."""
    stats = [Path(path).stat() for path in paths]
    return tuple(value for stat in stats for value in (stat.st_mtime_ns, stat.st_ino))


def client_context(trust: ClusterCredentials) -> ssl.SSLContext | None:
    """Return the TLS context for a client, or None if the cluster doesn't use TLS. Raises Invalid
    if the files can't be loaded."""
    return _context(trust, _file_stamps(trust), is_server=False) if trust.has_tls else None


def server_context(trust: ClusterCredentials) -> ssl.SSLContext | None:
    """Return the TLS context for a server, or None if the cluster doesn't use TLS. Each handshake
    uses the current files, or the last valid ones if the current ones can't be loaded. Raises
    Invalid if the files can't be loaded now."""
    if not trust.has_tls:
        return None
    first = latest = _context(trust, _file_stamps(trust), is_server=True)

    def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal latest
        try:
            latest = _context(trust, _file_stamps(trust), is_server=True)
        except Invalid as error:
            log.warning("certificate_reload_failed", error=str(error))
        connection.context = latest

    first.sni_callback = renew
    return first


def channel_credentials(trust: ClusterCredentials) -> grpc.ChannelCredentials:
    """Return the credentials of a gRPC channel. Raises Invalid if the files can't be read."""
    authority, key, certificate = _read(trust)
    return grpc.ssl_channel_credentials(authority, key, certificate)


def server_credentials(trust: ClusterCredentials) -> grpc.ServerCredentials:
    """Return the credentials of a gRPC server. Each handshake uses the current files, or the last
    valid ones if the current ones can't be loaded. Raises Invalid if the files can't be loaded
    now."""
    _context(trust, _file_stamps(trust), is_server=True)  # raises Invalid for bad files
    seen = _file_stamps(trust)

    def renew() -> Any:
        nonlocal seen
        now = _file_stamps(trust)
        if now == seen:
            return None
        try:
            _context(trust, now, is_server=True)
            configuration = _configuration(trust)
        except Invalid as error:
            log.warning("certificate_reload_failed", error=str(error))
            return None
        seen = now
        return configuration

    return grpc.dynamic_ssl_server_credentials(
        _configuration(trust), renew, require_client_authentication=True
    )


def _configuration(trust: ClusterCredentials) -> Any:
    authority, key, certificate = _read(trust)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


def _read(trust: ClusterCredentials) -> tuple[bytes, bytes, bytes]:
    try:
        authority, key, certificate = (
            Path(path).read_bytes() for path in (trust.authority, trust.key, trust.certificate)
        )
    except OSError as error:
        raise Invalid(f"can't load the TLS files ({_settings_text(trust)}): {error}") from error
    return authority, key, certificate


@lru_cache(maxsize=8)
def _context(trust: ClusterCredentials, seen: FileStamps, *, is_server: bool) -> ssl.SSLContext:
    """Return the TLS context for the current files. ``seen`` are the files' stamps: they are part
    of the cache's key, so that files are loaded again when they have changed."""
    side = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(trust.authority)
        context.load_cert_chain(trust.certificate, trust.key)
    except (OSError, ssl.SSLError) as error:
        raise Invalid(f"can't load the TLS files ({_settings_text(trust)}): {error}") from error
    return context


def _file_stamps(trust: ClusterCredentials) -> FileStamps:
    try:
        return file_stamps(trust.certificate, trust.key, trust.authority)
    except OSError as error:
        raise Invalid(f"can't load the TLS files ({_settings_text(trust)}): {error}") from error


def _settings_text(trust: ClusterCredentials) -> str:
    return (
        f"rpc_tls_certificate {trust.certificate}, rpc_tls_key {trust.key}, "
        f"rpc_tls_ca {trust.authority}"
    )
