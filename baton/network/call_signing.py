"""Proofs that a member knows the cluster secret, which itself never travels.

A call over gRPC carries one in its metadata. It is made for one method at one address, it holds for
half a minute, and once: whoever gets hold of it can do nothing with it, neither elsewhere nor here.
"""

import hmac
import secrets
import threading
from collections.abc import Iterable
from functools import lru_cache

from baton.clock import Clock, SystemClock

PROOF_HEADER = "x-baton-proof"

MAX_CLOCK_SKEW_SECONDS = 30.0
"""Between the clock of whoever proves and that of whoever checks."""

MAX_NONCES = 1 << 19
"""Nonces of twice the window, some 100 bytes each: 8,000 calls a second, which no server of ours
could answer."""

NONCE_BYTES = 12
MAX_PROOF_BYTES = 1024
MISSING_SECRET = "the cluster secret is missing or wrong (setting cluster_secret)"

Metadata = tuple[tuple[str, str], ...]


@lru_cache(maxsize=64)
def derive_key(secret: str, purpose: str) -> bytes:
    """A key for one purpose: what proves something in one place proves nothing in another."""
    return hmac.digest(secret.encode(), f"baton {purpose}".encode(), "sha256")


class CallSigner:
    """Proves in each call to ``target`` (host:port as the registry says it) that the caller knows
    ``secret``."""

    def __init__(
        self, secret: str, target: str, clock: Clock | None = None, purpose: str = "call"
    ) -> None:
        self._key = derive_key(secret, purpose)
        self._target = target
        self._clock = clock or SystemClock()

    def metadata(self, method: str) -> Metadata:
        """``method`` is its whole path: ``/package.Service/Method``."""
        said = f"{self._clock.wall_nanoseconds()} {secrets.token_hex(NONCE_BYTES)} {self._target}"
        return ((PROOF_HEADER, f"{said} {_code(self._key, method, said)}"),)


class CallVerifier:
    """Checks what :class:`CallSigner` has made. ``names`` are the addresses that this server goes
    by: a proof for another one is worth nothing. May be called by several threads."""

    def __init__(self, secret: str, clock: Clock | None = None, purpose: str = "call") -> None:
        self.names: set[str] = set()
        self._key = derive_key(secret, purpose)
        self._clock = clock or SystemClock()
        self._seen = _NonceCache(self._clock)

    def refusal(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """Why the call is not let in; empty when it is."""
        proof = next((value for key, value in metadata if key == PROOF_HEADER), "")
        if not isinstance(proof, str) or len(proof) > MAX_PROOF_BYTES:
            return MISSING_SECRET
        said, _, code = proof.rpartition(" ")
        if not hmac.compare_digest(code.encode(), _code(self._key, method, said).encode()):
            return MISSING_SECRET
        try:
            at, nonce, target = said.split(" ", 2)
            return self._refusal_of_known(int(at), nonce, target)
        except ValueError:
            return MISSING_SECRET

    def _refusal_of_known(self, at_nanoseconds: int, nonce: str, target: str) -> str:
        apart = abs(self._clock.wall_nanoseconds() - at_nanoseconds) / 1e9
        if target not in self.names:
            here = " or ".join(sorted(self.names)) or "nowhere yet"
            return f"the call is for {target}, and here is {here} (setting advertise_address)"
        if apart > MAX_CLOCK_SKEW_SECONDS:
            return (
                f"the caller's clock and this one's are {apart:.0f} s apart, or the call took as "
                f"long: {MAX_CLOCK_SKEW_SECONDS:.0f} are allowed"
            )
        if not self._seen.add(nonce, at_nanoseconds):
            return "the call's proof has been used before"
        return ""


class _NonceCache:
    """Nonces, for at least as long as their proofs hold. Should there be too many, the older half
    is forgotten, and proofs of that time hold no longer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: set[str] = set()
        self._earlier: set[str] = set()
        self._since = clock.monotonic()
        self._latest_recent = self._latest_earlier = self._floor = 0

    def add(self, nonce: str, at_nanoseconds: int) -> bool:
        """False for one that is known, or may have been forgotten."""
        with self._lock:
            self._turn()
            if nonce in self._recent or nonce in self._earlier or at_nanoseconds <= self._floor:
                return False
            self._recent.add(nonce)
            self._latest_recent = max(self._latest_recent, at_nanoseconds)
            return True

    def _turn(self) -> None:
        now, is_full = self._clock.monotonic(), len(self._recent) >= MAX_NONCES
        if is_full:
            self._floor = self._latest_earlier
        if is_full or now >= self._since + 2 * MAX_CLOCK_SKEW_SECONDS:
            self._earlier, self._recent, self._since = self._recent, set(), now
            self._latest_earlier, self._latest_recent = self._latest_recent, 0


def _code(key: bytes, method: str, said: str) -> str:
    return hmac.digest(key, f"{method} {said}".encode(), "sha256").hex()
