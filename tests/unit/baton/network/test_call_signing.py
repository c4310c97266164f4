"""Tests the signatures of calls: each is valid for one method at one address, only once, and for a
limited time."""

import pytest

from baton.clock import ManualClock
from baton.network import call_signing
from baton.network.call_signing import (
    MAX_CLOCK_SKEW_SECONDS,
    MISSING_SECRET_ERROR,
    PROOF_HEADER,
    CallSigner,
    CallVerifier,
)

SECRET, HERE, METHOD = "a secret of the cluster", "10.0.0.7:4000", "/baton.rpc.v1.Worker/Drain"


def checker(clock: ManualClock, *names: str) -> CallVerifier:
    verifier = CallVerifier(SECRET, clock)
    verifier.own_addresses |= set(names or (HERE,))
    return verifier


def test_valid_signature_is_accepted_and_hides_the_secret() -> None:
    clock = ManualClock(1e6)
    metadata = CallSigner(SECRET, HERE, clock).metadata(METHOD)
    assert checker(clock).refusal(METHOD, metadata) == ""
    assert SECRET not in str(metadata)


def test_signature_can_be_used_once() -> None:
    clock = ManualClock(1e6)
    gate, signer = checker(clock), CallSigner(SECRET, HERE, clock)
    metadata = signer.metadata(METHOD)
    assert gate.refusal(METHOD, metadata) == ""
    for seconds in (0.0, MAX_CLOCK_SKEW_SECONDS - 1):
        clock.advance(seconds)
        assert gate.refusal(METHOD, metadata) == "the call's proof has been used before"
    assert gate.refusal(METHOD, signer.metadata(METHOD)) == ""


def test_used_signature_is_remembered_while_it_is_valid() -> None:
    """If the caller's clock is ahead, its signature is valid for up to twice the allowed clock
    skew."""
    behind, ahead = ManualClock(1e6), ManualClock(1e6 + MAX_CLOCK_SKEW_SECONDS)
    gate, metadata = checker(behind), CallSigner(SECRET, HERE, ahead).metadata(METHOD)
    refusals = []
    for _ in range(200):
        refusals.append(gate.refusal(METHOD, metadata))
        behind.advance(0.5)
    assert refusals[0] == "" and "" not in refusals[1:]


def test_signature_for_another_member_is_rejected() -> None:
    """A member that is called by another member can't use the call's signature to call a third
    one."""
    clock = ManualClock(1e6)
    stolen = CallSigner(SECRET, "6.6.6.6:666", clock).metadata(METHOD)
    why = checker(clock).refusal(METHOD, stolen)
    assert why == (
        "the call is for 6.6.6.6:666, but this is 10.0.0.7:4000 (setting advertise_address)"
    )
    relabelled = stolen[0][1].replace("6.6.6.6:666", HERE)
    assert checker(clock).refusal(METHOD, [(PROOF_HEADER, relabelled)]) == MISSING_SECRET_ERROR


@pytest.mark.parametrize("seconds", [MAX_CLOCK_SKEW_SECONDS + 1, -MAX_CLOCK_SKEW_SECONDS - 1])
def test_clock_skew_beyond_the_limit_is_reported(seconds: float) -> None:
    metadata = CallSigner(SECRET, HERE, ManualClock(1e6)).metadata(METHOD)
    why = checker(ManualClock(1e6 + seconds)).refusal(METHOD, metadata)
    assert "are 31 s apart" in why and "30 s are allowed" in why


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("x-baton-secret", SECRET)],
        [(PROOF_HEADER, "")],
        [(PROOF_HEADER, SECRET)],
        [(PROOF_HEADER, b"\xff\xff")],
        [(PROOF_HEADER, "1 2 3 4")],
        [(PROOF_HEADER, "x" * 10_000)],
        CallSigner("another", HERE, ManualClock(1e6)).metadata(METHOD),
        CallSigner(SECRET, HERE, ManualClock(1e6)).metadata("/baton.rpc.v1.Worker/Inspect"),
    ],
)
def test_missing_or_wrong_signatures_are_rejected(metadata: list[tuple[str, str | bytes]]) -> None:
    assert checker(ManualClock(1e6)).refusal(METHOD, metadata) == MISSING_SECRET_ERROR


def test_malformed_signatures_of_a_known_secret_are_rejected() -> None:
    key = call_signing.derive_key(SECRET, "call")
    for claims in ("", "soon nonce " + HERE, f"1 {HERE}"):
        proved = f"{claims} {call_signing._code(key, METHOD, claims)}"
        assert (
            checker(ManualClock(1e6)).refusal(METHOD, [(PROOF_HEADER, proved)])
            == MISSING_SECRET_ERROR
        )


def test_remembered_nonces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """When there are too many nonces, the older half is forgotten, and signatures as old as these
    nonces are rejected."""
    monkeypatch.setattr(call_signing, "MAX_NONCES", 4)
    clock = ManualClock(1e6)
    gate, signer = checker(clock), CallSigner(SECRET, HERE, clock)
    used = []
    for _ in range(13):
        used.append(signer.metadata(METHOD))
        assert gate.refusal(METHOD, used[-1]) == ""
        clock.advance(0.001)
    assert len(gate._seen._recent) + len(gate._seen._earlier) <= 8
    assert all(gate.refusal(METHOD, each) for each in used)
    assert gate.refusal(METHOD, signer.metadata(METHOD)) == ""


def test_keys_differ_by_purpose_and_secret() -> None:
    keys = {call_signing.derive_key(s, p) for s in ("one", "other") for p in ("call", "registry")}
    assert len(keys) == 4
