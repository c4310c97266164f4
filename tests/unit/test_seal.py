"""Sealed entries: by whoever knows the secret, of this cluster, of this time."""

import pytest

from baton.clock import ManualClock
from baton.errors import Unauthorized
from baton.network.call_signing import MAX_CLOCK_SKEW_SECONDS
from baton.registry.entry_signing import EntrySigner

SECRET, CONTENT, TTL = "a secret of the cluster", b'{"id":"a","address":"10.0.0.7:1"}', 3.0


def seal(clock: ManualClock, secret: str | None = SECRET, cluster: str = "default") -> EntrySigner:
    return EntrySigner(secret, cluster, clock)


def test_what_was_sealed_opens() -> None:
    clock = ManualClock(1e6)
    entry = seal(clock).close(CONTENT, TTL)
    assert seal(clock).open(entry) == CONTENT
    assert SECRET.encode() not in entry and entry.startswith(CONTENT + b"\n")


def test_an_old_entry_can_t_be_put_back() -> None:
    clock = ManualClock(1e6)
    entry = seal(clock).close(CONTENT, TTL)
    clock.advance(TTL + MAX_CLOCK_SKEW_SECONDS - 1)
    assert seal(clock).open(entry) == CONTENT
    clock.advance(2)
    with pytest.raises(Unauthorized, match=r"it held until 31 s ago: it is old, or its host's"):
        seal(clock).open(entry)


def test_nothing_of_it_can_be_changed() -> None:
    clock = ManualClock(1e6)
    entry = seal(clock).close(CONTENT, TTL)
    for place in range(len(entry)):
        changed = entry[:place] + bytes([entry[place] ^ 1]) + entry[place + 1 :]
        with pytest.raises(Unauthorized):
            seal(clock).open(changed)
    longer = entry.replace(b"\n", b"0\n").replace(b" ", b"0 ")
    with pytest.raises(Unauthorized, match="its signature is wrong"):
        seal(clock).open(longer)


@pytest.mark.parametrize("entry", [CONTENT, b"", CONTENT + b"\n"])
def test_what_is_not_signed(entry: bytes) -> None:
    with pytest.raises(Unauthorized, match="it is not signed: whoever wrote it has no cluster_"):
        seal(ManualClock(1e6)).open(entry)


@pytest.mark.parametrize("rest", [b"\n \n", b"\nx y", b"\n1", b"\n1 ", b"\n" * 9])
def test_what_is_no_seal(rest: bytes) -> None:
    with pytest.raises(Unauthorized, match="its signature is wrong"):
        seal(ManualClock(1e6)).open(CONTENT + rest)


def test_another_secret_and_another_cluster() -> None:
    clock = ManualClock(1e6)
    for other in (seal(clock, "another"), seal(clock, cluster="other")):
        with pytest.raises(Unauthorized, match="its signature is wrong"):
            seal(clock).open(other.close(CONTENT, TTL))


def test_without_a_secret_everybody_is_believed() -> None:
    clock = ManualClock(1e6)
    assert seal(clock, None).close(CONTENT, TTL) == CONTENT
    assert seal(clock, None).open(CONTENT) == CONTENT
    assert seal(clock, None).open(seal(clock).close(CONTENT, TTL)) == CONTENT
