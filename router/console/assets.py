"""The files of the console's page, with the headers that tell browsers what the page may do."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""The content types of the files that are served. Files with other suffixes are not served."""

SECURITY_HEADERS = {
    # The page loads and calls this router only; it has no inline scripts, and nobody may frame it,
    # since a click on it may drain a worker.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}

INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page. ``etag`` changes with its content."""

    content: bytes
    content_type: str
    etag: str

    @property
    def headers(self) -> dict[str, str]:
        # A browser asks each time whether its copy is current, so that no page mixes two versions.
        return {**SECURITY_HEADERS, "etag": self.etag, "cache-control": "no-cache"}


@cache
def load_assets() -> dict[str, Asset]:
    """Return all files by their paths below ``assets``. They are read once, and only these files
    are served, so no path that a client sends reaches the file system."""
    return dict(_walk(files("router.console") / "assets", ""))


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Asset]]:
    found: list[tuple[str, Asset]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _walk(entry, f"{prefix}{entry.name}/")
            continue
        content_type = CONTENT_TYPES.get("." + entry.name.rpartition(".")[2])
        if content_type is not None:
            found.append((prefix + entry.name, _load(entry, content_type)))
    return found


def _load(entry: Traversable, content_type: str) -> Asset:
    content = entry.read_bytes()
    digest = hashlib.blake2b(content, digest_size=12).hexdigest()
    return Asset(content, content_type, f'"{digest}"')
