"""API keys: 256 random bits, kept as their digest.

A slow, salted hash is for passwords, which can be guessed one by one. A key of 256 random bits
can't be, so a plain SHA-256 of it gives nothing away; and a request is looked up by one digest, in
a microsecond, instead of being tried against every tenant's salt.
"""

import hashlib
import re
from base64 import urlsafe_b64encode

KEY_PREFIX = "sk-baton-"
API_KEY_BYTES = 32
MIN_KEY_CHARACTERS = 20
"""Of keys that somebody brings along: what is shorter may be guessed from its digest."""

_SCHEME = "sha256:"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")

KeyDigest = bytes


def new_api_key(random_bytes: bytes) -> str:
    """A fresh key."""
    assert len(random_bytes) >= API_KEY_BYTES, len(random_bytes)
    return KEY_PREFIX + urlsafe_b64encode(random_bytes).decode().rstrip("=")


def api_key_digest(key: str) -> KeyDigest:
    return hashlib.sha256(key.encode()).digest()


def hash_api_key(key: str) -> str:
    """How a key stands in a tenants file."""
    return _SCHEME + api_key_digest(key).hex()


def parse_hashed_api_key(text: str) -> KeyDigest | None:
    """The digest in ``sha256:HEX``; None for anything else."""
    match = _DIGEST.fullmatch(text)
    return bytes.fromhex(match[1]) if match is not None else None
