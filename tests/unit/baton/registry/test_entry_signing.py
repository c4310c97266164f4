"""Tests that the signature of a registry entry proves that a holder of the secret wrote the entry,
and that it is valid for one cluster and for a limited time."""

import pytest

from baton.clock import ManualClock
from baton.errors import Unauthorized
from baton.network.call_signing import MAX_CLOCK_SKEW_SECONDS
from baton.registry.entry_signing import EntrySigner

SECRET, CONTENT, TTL = "a secret of the cluster", b'{"id":"a","address":"10.0.0.7:1"}', 3.0


def signer(
    clock: ManualClock, secret: str | None = SECRET, cluster: str = "default"
) -> EntrySigner:
    return EntrySigner(secret, cluster, clock)


def test_signed_entry_is_accepted() -> None:
    clock = ManualClock(1e6)
    entry = signer(clock).sign(CONTENT, TTL)
    assert signer(clock).verify(entry) == CONTENT
    assert SECRET.encode() not in entry and entry.startswith(CONTENT + b"\n")


def test_old_entry_can_not_be_replayed() -> None:
    clock = ManualClock(1e6)
    entry = signer(clock).sign(CONTENT, TTL)
    clock.advance(TTL + MAX_CLOCK_SKEW_SECONDS - 1)
    assert signer(clock).verify(entry) == CONTENT
    clock.advance(2)
    with pytest.raises(Unauthorized, match=r"the entry expired 31 s ago: it is old, or its host's"):
        signer(clock).verify(entry)


def test_any_changed_byte_is_detected() -> None:
    clock = ManualClock(1e6)
    entry = signer(clock).sign(CONTENT, TTL)
    for place in range(len(entry)):
        changed = entry[:place] + bytes([entry[place] ^ 1]) + entry[place + 1 :]
        with pytest.raises(Unauthorized):
            signer(clock).verify(changed)
    longer = entry.replace(b"\n", b"0\n").replace(b" ", b"0 ")
    with pytest.raises(Unauthorized, match="the entry's signature is wrong"):
        signer(clock).verify(longer)


@pytest.mark.parametrize("entry", [CONTENT, b"", CONTENT + b"\n"])
def test_unsigned_entry_is_rejected(entry: bytes) -> None:
    with pytest.raises(Unauthorized, match="the entry is not signed: its writer has no cluster_"):
        signer(ManualClock(1e6)).verify(entry)


@pytest.mark.parametrize("rest", [b"\n \n", b"\nx y", b"\n1", b"\n1 ", b"\n" * 9])
def test_malformed_signature_is_rejected(rest: bytes) -> None:
    with pytest.raises(Unauthorized, match="the entry's signature is wrong"):
        signer(ManualClock(1e6)).verify(CONTENT + rest)


def test_signature_of_another_secret_or_cluster_is_rejected() -> None:
    clock = ManualClock(1e6)
    for other in (signer(clock, "another"), signer(clock, cluster="other")):
        with pytest.raises(Unauthorized, match="the entry's signature is wrong"):
            signer(clock).verify(other.sign(CONTENT, TTL))


def test_without_a_secret_all_entries_are_accepted() -> None:
    clock = ManualClock(1e6)
    assert signer(clock, None).sign(CONTENT, TTL) == CONTENT
    assert signer(clock, None).verify(CONTENT) == CONTENT
    assert signer(clock, None).verify(signer(clock).sign(CONTENT, TTL)) == CONTENT
