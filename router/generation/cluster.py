"""The router's view of the cluster, refreshed from the registry."""

from collections.abc import Callable, Sequence

from baton.clock import Clock
from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.states import Role
from baton.core.worker_kinds import WorkerKind
from baton.registry.membership import Membership, MemberSource, ModelMembership
from router.generation.model_workers import ModelWorkers


class Cluster:
    """The members of the cluster as of the last refresh. During an outage of the registry, these
    are the last known members (see :class:`Membership`)."""

    def __init__(self, registry: MemberSource, clock: Clock) -> None:
        self._membership = Membership(registry, clock)

    async def run(self) -> None:
        """Keep refreshing the view of the cluster's members until cancelled."""
        await self._membership.run()

    async def refresh(self) -> None:
        await self._membership.refresh()

    @property
    def members(self) -> Sequence[Member]:
        """All members, sorted by id."""
        return self._membership.members

    @property
    def last_refreshed_at(self) -> float:
        """The monotonic time when the registry last answered; minus infinity if it never did."""
        return self._membership.last_answer_seconds

    @property
    def incompatible_ids(self) -> frozenset[WorkerId]:
        """The ids of workers that are not used, since their numerics differ from those of the other
        workers of their model."""
        return self._membership.current.incompatible_ids

    def ready_members(self, role: Role) -> Sequence[Member]:
        """Return the ready members of a role, sorted by id. Workers that are incompatible with the
        other workers of their model are left out (:class:`~baton.registry.member_list.MemberList`).
        """
        return self._membership.ready(role)

    def ready_workers(
        self, can: Callable[[WorkerKind], bool] = lambda kind: True
    ) -> Sequence[Member]:
        """Return the :meth:`ready_members` of all kinds of workers of which ``can`` is true."""
        return self._membership.current.ready_workers(can)

    @property
    def num_routers(self) -> int:
        """The number of ready routers, including this one once it has registered."""
        return len(self.ready_members(Role.ROUTER))

    def workers_of(self, model: str, max_model_tokens: int) -> ModelWorkers:
        """Return a view of the workers that serve ``model``. It is refreshed with the cluster's
        view. ``max_model_tokens`` is the length of the model's context, in tokens."""
        return ModelWorkers(ModelMembership(self._membership, model), model, max_model_tokens)
