"""Checks at startup that a worker computes bitwise the same logits as the other workers of its
model."""

from collections.abc import Iterable

from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.numerics import incompatible_peer
from baton.errors import Invalid


def check_same_numerics(
    members: Iterable[Member], own: WorkerId, model: str, fingerprint: str
) -> None:
    """Raise Invalid, with advice, if the oldest other worker of ``model`` has different numerics.
    ``fingerprint`` identifies the numerics of this worker (``own``); it is empty if this worker is
    not deterministic. Does nothing if neither this worker nor any other worker of the model is
    deterministic."""
    other = incompatible_peer(members, own, model, fingerprint)
    if other is None:
        return
    if not fingerprint:
        why = "is deterministic"
        advice = f"Start {own} with deterministic=true, too, or"
    elif not other.numerics_fingerprint:
        why = "is not deterministic"
        advice = f"Start {other.id} with deterministic=true first, or {own}"
    else:
        why = f"computes bitwise different results (in {other.kv_dtype})"
        advice = f"Start {own} with the same dtype, model and version of Baton, or"
    raise Invalid(
        f"worker {own} can't join: worker {other.id} of the same model {why}. {advice} in a "
        "cluster of its own (cluster=NAME)",
        param="deterministic",
    )
