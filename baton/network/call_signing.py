"""Signatures that prove that a member knows the cluster secret. The secret itself is never sent.

Each gRPC call carries a signature in its metadata. A signature is valid for one method at one
address, for half a minute, and only once, so an intercepted signature is useless.
"""

import hmac
import secrets
import threading
from collections.abc import Iterable
from functools import lru_cache

from baton.clock import Clock, SystemClock

PROOF_HEADER = "x-baton-proof"

MAX_CLOCK_SKEW_SECONDS = 30.0
"""Maximum difference between the clocks of the signer and the verifier."""

MAX_NONCES = 1 << 19
"""Maximum number of nonces kept for one period of twice the maximum clock skew, at some 100 bytes
each. It suffices for 8,000 calls a second, more than any Baton server could answer."""

NONCE_BYTES = 12
MAX_PROOF_BYTES = 1024
MISSING_SECRET_ERROR = "the cluster secret is missing or wrong (setting cluster_secret)"

Metadata = tuple[tuple[str, str], ...]


@lru_cache(maxsize=64)
def derive_key(secret: str, purpose: str) -> bytes:
    """Derive a key from the secret. Each purpose has a key of its own, so that a signature made for
    one purpose is invalid for any other."""
    return hmac.digest(secret.encode(), f"baton {purpose}".encode(), "sha256")


class CallSigner:
    """Signs calls to ``target`` (host:port as in the registry) with ``secret``."""

    def __init__(
        self, secret: str, target: str, clock: Clock | None = None, purpose: str = "call"
    ) -> None:
        self._key = derive_key(secret, purpose)
        self._target = target
        self._clock = clock or SystemClock()

    def metadata(self, method: str) -> Metadata:
        """Return the metadata for a call. ``method`` is the call's whole path:
        ``/package.Service/Method``."""
        claim = f"{self._clock.wall_nanoseconds()} {secrets.token_hex(NONCE_BYTES)} {self._target}"
        return ((PROOF_HEADER, f"{claim} {_code(self._key, method, claim)}"),)


class CallVerifier:
    """Verifies signatures of :class:`CallSigner`. ``own_addresses`` are the addresses of this
    server: a signature for another address is invalid. Thread-safe."""

    def __init__(self, secret: str, clock: Clock | None = None, purpose: str = "call") -> None:
        self.own_addresses: set[str] = set()
        self._key = derive_key(secret, purpose)
        self._clock = clock or SystemClock()
        self._seen = _NonceCache(self._clock)

    def refusal(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """Verify a call's signature. Return why the call is refused; empty if it is allowed."""
        proof = next((value for key, value in metadata if key == PROOF_HEADER), "")
        if not isinstance(proof, str) or len(proof) > MAX_PROOF_BYTES:
            return MISSING_SECRET_ERROR
        claim, _, code = proof.rpartition(" ")
        if not hmac.compare_digest(code.encode(), _code(self._key, method, claim).encode()):
            return MISSING_SECRET_ERROR
        try:
            at, nonce, target = claim.split(" ", 2)
            return self._refusal_of_authentic(int(at), nonce, target)
        except ValueError:
            return MISSING_SECRET_ERROR

    def _refusal_of_authentic(self, at_nanoseconds: int, nonce: str, target: str) -> str:
        skew = abs(self._clock.wall_nanoseconds() - at_nanoseconds) / 1e9
        if target not in self.own_addresses:
            here = " or ".join(sorted(self.own_addresses)) or "nowhere yet"
            return f"the call is for {target}, but this is {here} (setting advertise_address)"
        if skew > MAX_CLOCK_SKEW_SECONDS:
            return (
                f"the caller's clock and this one's are {skew:.0f} s apart, or the call took that "
                f"long: at most {MAX_CLOCK_SKEW_SECONDS:.0f} s are allowed"
            )
        if not self._seen.add(nonce, at_nanoseconds):
            return "the call's proof has been used before"
        return ""


class _NonceCache:
    """Keeps nonces for at least as long as their signatures are valid. When there are too many, the
    older half is dropped, and all signatures from that period become invalid."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: set[str] = set()
        self._earlier: set[str] = set()
        self._since = clock.monotonic()
        self._latest_recent = self._latest_earlier = self._floor = 0

    def add(self, nonce: str, at_nanoseconds: int) -> bool:
        """Record a nonce. Return False if it was used before, or may have been used before because
        it is as old as the nonces that were dropped."""
        with self._lock:
            self._rotate()
            if nonce in self._recent or nonce in self._earlier or at_nanoseconds <= self._floor:
                return False
            self._recent.add(nonce)
            self._latest_recent = max(self._latest_recent, at_nanoseconds)
            return True

    def _rotate(self) -> None:
        now, is_full = self._clock.monotonic(), len(self._recent) >= MAX_NONCES
        if is_full:
            self._floor = self._latest_earlier
        if is_full or now >= self._since + 2 * MAX_CLOCK_SKEW_SECONDS:
            self._earlier, self._recent, self._since = self._recent, set(), now
            self._latest_earlier, self._latest_recent = self._latest_recent, 0


def _code(key: bytes, method: str, claim: str) -> str:
    return hmac.digest(key, f"{method} {claim}".encode(), "sha256").hex()
