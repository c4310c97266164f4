"""A worker whose logits would have other bits than its cluster's does not join it."""

from collections.abc import Iterable

from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.numerics import incompatible_peer
from baton.errors import Invalid


def check_same_numerics(members: Iterable[Member], own: WorkerId, arithmetic: str) -> None:
    """``arithmetic`` is this worker's, empty where it promises nothing. Raises Invalid that says
    what would help."""
    other = incompatible_peer(members, own, arithmetic)
    if other is None:
        return
    if not arithmetic:
        told = "which promises determinism: start this one with deterministic=true, too"
    elif not other.arithmetic:
        told = "which doesn't promise determinism: start that one with deterministic=true first"
    else:
        told = (
            f"which computes the same with other bits (in {other.kv_dtype}): start this one with "
            "the same dtype, model and version of Baton"
        )
    raise Invalid(
        f"this cluster has worker {other.id}, {told}; or give this one a cluster of its own "
        "(cluster=NAME)",
        param="deterministic",
    )
