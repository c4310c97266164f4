"""Signs entries of the registry with the cluster secret, since not every program that may write to
Redis is a member.

A signed entry consists of the content, a line break, the expiry (wall clock, milliseconds), a
space, and a signature: HMAC-SHA256 over the cluster's name, the content and the expiry, in hex. It
does not contain the secret.
"""

import hmac

from baton.clock import Clock
from baton.errors import Unauthorized
from baton.network.call_signing import MAX_CLOCK_SKEW_SECONDS, derive_key


class EntrySigner:
    """Signs and verifies entries. Without a secret, entries are unsigned, and all are accepted."""

    def __init__(self, secret: str | None, cluster: str, clock: Clock) -> None:
        self._key = derive_key(secret, "registry") if secret else None
        self._cluster = cluster.encode()
        self._clock = clock

    def sign(self, content: bytes, seconds: float) -> bytes:
        """Return ``content`` as a signed entry that is valid for ``seconds``. ``content`` must not
        contain a line break."""
        if self._key is None:
            return content
        until = round(self._clock.wall_nanoseconds() / 1e6 + seconds * 1e3)
        claim = b"%b\n%d" % (content, until)
        return b"%b %b" % (claim, self._code(self._key, claim))

    def verify(self, entry: bytes) -> bytes:
        """Verify ``entry``, and return its content. Raises Unauthorized if it was not signed with
        the secret, or expired more than ``MAX_CLOCK_SKEW_SECONDS`` ago."""
        content, _, rest = entry.partition(b"\n")
        if self._key is None:
            return content
        if not rest:
            raise Unauthorized(
                "the entry is not signed: its writer has no cluster_secret, or runs an older "
                "version of Baton"
            )
        claim, _, code = entry.rpartition(b" ")
        if not hmac.compare_digest(code, self._code(self._key, claim)):
            raise Unauthorized(
                "the entry's signature is wrong: its writer has a different cluster_secret"
            )
        self._check_time(int(rest.partition(b" ")[0]))
        return content

    def _check_time(self, until_milliseconds: int) -> None:
        late = self._clock.wall_nanoseconds() / 1e9 - until_milliseconds / 1e3
        if late > MAX_CLOCK_SKEW_SECONDS:
            raise Unauthorized(
                f"the entry expired {late:.0f} s ago: it is old, or its host's clock is behind "
                f"({MAX_CLOCK_SKEW_SECONDS:.0f} s are allowed)"
            )

    def _code(self, key: bytes, claim: bytes) -> bytes:
        return hmac.digest(key, self._cluster + b"\n" + claim, "sha256").hex().encode()
