"""API keys, which consist of 256 random bits and are stored only as digests.

Slow, salted hashes protect passwords, which can be guessed. A key of 256 random bits can't be
guessed, so a plain SHA-256 digest reveals nothing about it. And a key can be looked up by this
digest in a microsecond; with salts, it would have to be tried against every tenant's salt.
"""

import hashlib
import re
from base64 import urlsafe_b64encode

KEY_PREFIX = "sk-baton-"
API_KEY_BYTES = 32
MIN_KEY_CHARACTERS = 20
"""Minimum length of keys that :func:`new_api_key` did not make: shorter ones might be guessed from
their digest."""

_SCHEME = "sha256:"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")

KeyDigest = bytes


def new_api_key(random_bytes: bytes) -> str:
    """Make a key from random bytes."""
    assert len(random_bytes) >= API_KEY_BYTES, len(random_bytes)
    return KEY_PREFIX + urlsafe_b64encode(random_bytes).decode().rstrip("=")


def api_key_digest(key: str) -> KeyDigest:
    return hashlib.sha256(key.encode()).digest()


def hash_api_key(key: str) -> str:
    """Return the digest of a key as text, for a tenants file."""
    return _SCHEME + api_key_digest(key).hex()


def parse_hashed_api_key(text: str) -> KeyDigest | None:
    """Return the digest that ``sha256:HEX`` contains; return None for any other text."""
    match = _DIGEST.fullmatch(text)
    return bytes.fromhex(match[1]) if match is not None else None
