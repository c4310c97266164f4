"""Entries of the registry, sealed with the cluster secret: who may write to Redis is no member yet.

A sealed entry is the content, a line break, until when it holds (wall clock, milliseconds), a
space, and HMAC-SHA256 over the cluster's name and all of that, in hex. The secret is not in it.
"""

import hmac

from baton.clock import Clock
from baton.errors import Unauthorized
from baton.network.call_signing import MAX_CLOCK_SKEW_SECONDS, derive_key


class EntrySigner:
    """Without a secret, entries are content alone, and everybody's are believed."""

    def __init__(self, secret: str | None, cluster: str, clock: Clock) -> None:
        self._key = derive_key(secret, "registry") if secret else None
        self._cluster = cluster.encode()
        self._clock = clock

    def close(self, content: bytes, seconds: float) -> bytes:
        """The entry of ``content``, which holds for ``seconds``. ``content`` has no line break."""
        if self._key is None:
            return content
        until = round(self._clock.wall_nanoseconds() / 1e6 + seconds * 1e3)
        said = b"%b\n%d" % (content, until)
        return b"%b %b" % (said, self._code(self._key, said))

    def open(self, entry: bytes) -> bytes:
        """The content of ``entry``. Raises Unauthorized for one that was not sealed with the
        secret, or held until longer ago than clocks may be apart."""
        content, _, rest = entry.partition(b"\n")
        if self._key is None:
            return content
        if not rest:
            raise Unauthorized(
                "it is not signed: whoever wrote it has no cluster_secret, or is an older version"
            )
        said, _, code = entry.rpartition(b" ")
        if not hmac.compare_digest(code, self._code(self._key, said)):
            raise Unauthorized("its signature is wrong: cluster_secret is the same for all members")
        self._check_time(int(rest.partition(b" ")[0]))
        return content

    def _check_time(self, until_milliseconds: int) -> None:
        late = self._clock.wall_nanoseconds() / 1e9 - until_milliseconds / 1e3
        if late > MAX_CLOCK_SKEW_SECONDS:
            raise Unauthorized(
                f"it held until {late:.0f} s ago: it is old, or its host's clock is behind "
                f"({MAX_CLOCK_SKEW_SECONDS:.0f} s are allowed)"
            )

    def _code(self, key: bytes, said: bytes) -> bytes:
        return hmac.digest(key, self._cluster + b"\n" + said, "sha256").hex().encode()
