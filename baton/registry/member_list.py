"""An immutable list of the cluster's members, and the part of it that serves one model."""

from collections.abc import Iterable, Sequence

from baton.core.ids import WorkerId
from baton.core.kv_fidelity import workers_with_other_codec
from baton.core.member import Member
from baton.core.numerics import incompatible_workers
from baton.core.states import WORKER_ROLES, Role, WorkerState


class MemberList:
    """Members ordered by id. Nothing in it changes, so it can be read from any thread, and what is
    derived from it is computed once."""

    def __init__(self, members: Iterable[Member] = ()) -> None:
        self.members: list[Member] = sorted(members, key=lambda member: member.id)
        self.other_codec_ids = workers_with_other_codec(self.members)
        """The ids of workers whose lossy KV codec differs from that of the oldest worker of their
        model (:mod:`baton.core.kv_fidelity`)."""
        self.other_numerics_ids = incompatible_workers(self.members)
        """The ids of workers whose logits may differ in bits from those of the oldest worker of
        their model (:mod:`baton.core.numerics`)."""
        self.incompatible_ids: frozenset[WorkerId] = self.other_codec_ids | self.other_numerics_ids
        """The ids of workers that must not be used, whatever their state."""
        self._ready: dict[Role, Sequence[Member]] = {}
        self._by_model: dict[str, MemberList] = {}

    def ready(self, role: Role) -> Sequence[Member]:
        """Return the members of ``role`` in state READY, ordered by id, without incompatible
        workers."""
        known = self._ready.get(role)
        if known is None:
            known = self._ready[role] = [
                member
                for member in self.members
                if member.role is role
                and member.state is WorkerState.READY
                and member.id not in self.incompatible_ids
            ]
        return known

    @property
    def models(self) -> frozenset[str]:
        """The names of the models that the workers serve."""
        return frozenset(member.model for member in self.members if member.role in WORKER_ROLES)

    def of_model(self, model: str) -> "MemberList":
        """Return the workers that serve ``model``, and all members that are not workers."""
        known = self._by_model.get(model)
        if known is None:
            known = self._by_model[model] = MemberList(
                member
                for member in self.members
                if member.role not in WORKER_ROLES or member.model == model
            )
        return known
