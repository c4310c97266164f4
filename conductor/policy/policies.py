"""All policies by name."""

from dataclasses import replace
from functools import partial

from baton.errors import Invalid
from conductor.policy.baton import BatonConfig, place
from conductor.policy.decision import Decision
from conductor.policy.fleet import Query, Snapshot
from conductor.policy.rivals import RIVALS, Rule

DEFAULT = "baton"


def policy_named(name: str, config: BatonConfig = BatonConfig()) -> Rule:
    """Raises Invalid. ``full_scan`` is Baton's score over all workers instead of a few."""
    if name == DEFAULT:
        return partial(_place, config=config)
    if name == "full_scan":
        return partial(_place, config=replace(config, full_scan=True))
    if name not in RIVALS:
        raise Invalid(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    return RIVALS[name]


def _place(snapshot: Snapshot, query: Query, config: BatonConfig) -> Decision:
    return place(snapshot, query, config)


POLICIES = (DEFAULT, "full_scan", *RIVALS)
