"""The server under load: its address, credentials and TLS settings, and the head of a request to
it."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from baton.errors import Invalid

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """The server's address and credentials. ``base_path`` is the path before ``/v1``; ``tls`` is
    None for plain HTTP."""

    host: str
    port: int
    base_path: str = ""
    api_key: str = ""
    tls: ssl.SSLContext | None = None

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.base_path}"

    def request_head(self, method: str, path: str) -> bytes:
        """Return the head of a request, up to and including ``content-length: ``."""
        lines = [
            f"{method} {self.base_path}/v1{path} HTTP/1.1",
            f"host: {self.authority}",
            "user-agent: baton-bench",
            "accept: */*",
            "content-type: application/json",
        ]
        if self.api_key:
            lines.append(f"authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "content-length: "]).encode("latin-1")


def parse_target(url: str, api_key: str, ca: Path | None, insecure: bool) -> BenchTarget:
    """Parse the URL of a server, with or without ``/v1``, and the options for connecting to it.
    Raises Invalid if one of them is wrong."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError as error:
        raise Invalid(f"--url {url}: {error}") from error
    if parts.scheme not in PORTS or not parts.hostname:
        raise Invalid(f"--url {url}: it must look like http://HOST:PORT or https://HOST")
    if not all(0x21 <= ord(character) <= 0x7E for character in api_key):
        raise Invalid("--api-key has characters that an HTTP header can't contain")
    return BenchTarget(
        parts.hostname,
        port or PORTS[parts.scheme],
        parts.path.rstrip("/").removesuffix("/v1"),
        api_key,
        _tls(ca, insecure) if parts.scheme == "https" else None,
    )


def _tls(ca: Path | None, insecure: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise Invalid(f"--ca {ca}: {error}") from error
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
