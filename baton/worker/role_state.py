"""What a worker is for, and whether it takes requests."""

from collections.abc import Callable

from baton.core.states import WORKER_TRANSITIONS, Role, WorkerState
from baton.errors import Invalid, Unavailable
from baton.pools.base import WORKER_ROLES


class RoleState:
    """A worker's state, and the role that it announces. It drains to leave, for good or until it is
    told to stay, or to take another role once nothing is left. ``on_change`` is called when others
    should hear of either."""

    def __init__(self, role: Role, on_change: Callable[[], None]) -> None:
        self.role = role
        self.state = WorkerState.JOINING
        self.drains_since: float | None = None
        self._next_role = role
        self._leaves = False
        self._on_change = on_change

    def begin(self) -> None:
        """The worker is ready, unless it was told to leave already."""
        if self.state is WorkerState.JOINING:
            self._move(WorkerState.READY)

    @property
    def leaves(self) -> bool:
        """It drains, and not for another role."""
        return self.state is WorkerState.DRAINING and self._next_role is self.role

    def leave(self, now_seconds: float, for_good: bool = True) -> None:
        """Idempotent. Unless it is for good, :meth:`convert` to the role that it has ends it."""
        self._leaves = self._leaves or for_good
        self._next_role = self.role
        self._drain(now_seconds)

    def convert(self, role: Role, now_seconds: float) -> None:
        """Idempotent; back to the role that it has ends the drain. Raises Invalid for a role
        that no worker has, Unavailable for a worker that leaves for good."""
        if role not in WORKER_ROLES:
            raise Invalid(f"a worker can't become a {role.value}", param="role")
        if self._leaves:
            raise Unavailable("the worker leaves")
        self._next_role = role
        if self.state is WorkerState.JOINING:
            self.role = role
        elif role is not self.role:
            self._drain(now_seconds)
        elif self.state is WorkerState.DRAINING:
            self._serve()
        self._on_change()

    def settle(self) -> None:
        """Nothing is left: who drained for another role takes it."""
        if self._next_role is not self.role and not self._leaves:
            self._serve()
            self._on_change()

    def _drain(self, now_seconds: float) -> None:
        if self.state is not WorkerState.DRAINING:
            self._move(WorkerState.DRAINING)
            self.drains_since = now_seconds

    def _serve(self) -> None:
        self.role, self.drains_since = self._next_role, None
        self._move(WorkerState.READY)

    def _move(self, state: WorkerState) -> None:
        assert state in WORKER_TRANSITIONS[self.state], f"{self.state} → {state}"
        self.state = state
