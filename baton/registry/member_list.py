"""An immutable list of the cluster's members, and the part of it that serves one model."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.numerics import incompatible_workers
from baton.core.states import Role, WorkerState
from baton.core.worker_kinds import WORKER_KINDS, WorkerKind


class MemberList:
    """Members ordered by id. Nothing in it changes, so it can be read from any thread, and what is
    derived from it is computed once."""

    def __init__(self, members: Iterable[Member] = ()) -> None:
        self.members: list[Member] = sorted(members, key=lambda member: member.id)
        self.incompatible_ids: frozenset[WorkerId] = incompatible_workers(self.members)
        """The ids of workers that must not be used, whatever their state: their logits may differ
        in bits from those of the oldest worker of their model (:mod:`baton.core.numerics`)."""
        self._ready: dict[tuple[Role, str], Sequence[Member]] = {}
        self._by_model: dict[str, MemberList] = {}

    def ready(self, role: Role, variant_id: str = "") -> Sequence[Member]:
        """Return the members of ``role`` in state READY, ordered by id, without incompatible
        workers. If ``variant_id`` is not empty, return only workers of that variant."""
        known = self._ready.get((role, variant_id))
        if known is None:
            known = self._ready[role, variant_id] = [
                member
                for member in self.members
                if member.role is role
                and member.state is WorkerState.READY
                and member.id not in self.incompatible_ids
                and (not variant_id or member.variant.id == variant_id)
            ]
        return known

    def ready_workers(
        self, can: Callable[[WorkerKind], bool] = lambda kind: True, variant_id: str = ""
    ) -> Sequence[Member]:
        """Return the :meth:`ready` workers of all kinds of which ``can`` is true."""
        roles = [role for role, kind in WORKER_KINDS.items() if can(kind)]
        return [member for role in roles for member in self.ready(role, variant_id)]

    @property
    def expected_workers(self) -> Sequence[Member]:
        """The workers that may soon be ready: those that are starting, and those that drain, as
        workers also do for as long as their server makes no progress."""
        expected = (WorkerState.JOINING, WorkerState.DRAINING)
        return [
            each for each in self.members if each.role in WORKER_KINDS and each.state in expected
        ]

    @property
    def models(self) -> frozenset[str]:
        """The names of the models that the workers serve."""
        return frozenset(member.model for member in self.members if member.role in WORKER_KINDS)

    def mixed_models(self) -> Mapping[str, Sequence[str]]:
        """Return the models whose workers are of several variants, with the variants' ids."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for member in self.members:
            if member.role in WORKER_KINDS and member.state is not WorkerState.GONE:
                found[member.model].add(member.variant.id)
        return {model: sorted(ids) for model, ids in found.items() if len(ids) > 1}

    def of_model(self, model: str) -> "MemberList":
        """Return the workers that serve ``model``, and all members that are not workers."""
        known = self._by_model.get(model)
        if known is None:
            known = self._by_model[model] = MemberList(
                member
                for member in self.members
                if member.role not in WORKER_KINDS or member.model == model
            )
        return known
