"""All placement policies, by name."""

from dataclasses import replace
from functools import partial

from baton.core.ids import WorkerId
from baton.errors import Invalid, Unavailable
from conductor.policy.baselines import BASELINES, PlacementPolicy
from conductor.policy.baton import place
from conductor.policy.config import BatonPolicyConfig
from conductor.policy.decision import Decision
from conductor.policy.kv_transfer_time import with_codec
from conductor.policy.snapshot import PolicyQuery, Snapshot, WorkerPool, WorkerViewT

DEFAULT_POLICY = "baton"


def get_policy(name: str, config: BatonPolicyConfig = BatonPolicyConfig()) -> PlacementPolicy:
    """Return the policy called ``name``: ``baton``, ``full_scan`` or a baseline. ``full_scan`` is
    Baton's policy with one difference: all prefill workers are scored, not only a few candidates.
    Raises Invalid for an unknown name."""
    if name == DEFAULT_POLICY:
        return partial(_place, config=config)
    if name == "full_scan":
        return partial(_place, config=replace(config, full_scan=True))
    if name not in BASELINES:
        raise Invalid(f"unknown policy {name!r}; known policies: {', '.join(PLACEMENT_POLICIES)}")
    return partial(_place_by_rule, rule=BASELINES[name])


def _place(snapshot: Snapshot, query: PolicyQuery, config: BatonPolicyConfig) -> Decision:
    return with_codec(snapshot, query, place(snapshot, query, config))


def _place_by_rule(snapshot: Snapshot, query: PolicyQuery, rule: PlacementPolicy) -> Decision:
    """Apply a baseline policy. The baselines handle neither excluded workers nor empty pools, so
    both are handled here."""
    if query.excluded:
        prefills = _without(snapshot.prefills, query.excluded)
        decodes = _without(snapshot.decodes, query.excluded)
        mixed = _without(snapshot.mixed, query.excluded)
        snapshot = replace(snapshot, prefills=prefills, decodes=decodes, mixed=mixed)
    if len(snapshot.prefills) and len(snapshot.decodes):
        return with_codec(snapshot, query, rule(snapshot, query))
    if len(snapshot.mixed):
        worker = next(snapshot.mixed.by_load())
        return Decision(None, worker.id, "the mixed worker with the most free memory")
    if len(snapshot.decodes):
        decode = next(snapshot.decodes.by_load())
        return Decision(None, decode.id, "no prefill worker is ready")
    if len(snapshot.prefills):
        prefill = next(snapshot.prefills.by_load())
        seconds = prefill.cost.seconds(query.num_tokens)
        queue = prefill.queue_seconds(snapshot.now_seconds)
        reason = "no decode worker is ready"
        return Decision(prefill.id, prefill.id, reason, None, seconds, queue + seconds)
    raise Unavailable("no worker is ready")


def _without(
    pool: WorkerPool[WorkerViewT], excluded: frozenset[WorkerId]
) -> WorkerPool[WorkerViewT]:
    return WorkerPool([view for view in pool if view.id not in excluded])


PLACEMENT_POLICIES = (DEFAULT_POLICY, "full_scan", *BASELINES)
