"""Checks at startup that a worker computes bitwise the same logits as the other workers of its
cluster."""

from collections.abc import Iterable

from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.numerics import incompatible_peer
from baton.errors import Invalid


def check_same_numerics(members: Iterable[Member], own: WorkerId, fingerprint: str) -> None:
    """Raise Invalid, with advice, if the cluster has a worker with different numerics.
    ``fingerprint`` identifies this worker's numerics; it is empty if it does not guarantee
    determinism."""
    other = incompatible_peer(members, own, fingerprint)
    if other is None:
        return
    if not fingerprint:
        advice = "which is deterministic: start this one with deterministic=true, too"
    elif not other.numerics_fingerprint:
        advice = "which is not deterministic: start that one with deterministic=true first"
    else:
        advice = (
            f"which computes bitwise different results (in {other.kv_dtype}): start this one with "
            "the same dtype, model and version of Baton"
        )
    raise Invalid(
        f"this cluster has worker {other.id}, {advice}; or give this one a cluster of its own "
        "(cluster=NAME)",
        param="deterministic",
    )
