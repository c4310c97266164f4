"""A worker's role, and whether it accepts requests."""

from collections.abc import Callable

from baton.core.states import WORKER_TRANSITIONS, Role, WorkerState
from baton.core.worker_kinds import WORKER_KINDS, list_kinds
from baton.errors import Invalid, Unavailable


class RoleState:
    """A worker's state and its announced role. A worker drains either in order to leave the cluster
    (permanently, or until an administrator cancels the drain) or in order to change its role.
    ``on_change`` is called when a change of state or role should be announced."""

    def __init__(self, role: Role, on_change: Callable[[], None] = lambda: None) -> None:
        self.role = role
        self.state = WorkerState.JOINING
        self.draining_since_seconds: float | None = None
        self._next_role = role
        self._is_permanent = False
        self._on_change = on_change

    def mark_ready(self) -> None:
        """Make the worker ready, unless it was already told to drain."""
        if self.state is WorkerState.JOINING:
            self._set_state(WorkerState.READY)

    @property
    def is_leaving(self) -> bool:
        """Whether the worker is draining in order to leave the cluster, rather than to change its
        role."""
        return self.state is WorkerState.DRAINING and self._next_role is self.role

    def start_drain(self, now_seconds: float, permanent: bool = True) -> None:
        """Drain in order to leave the cluster. Idempotent. Unless the drain is permanent, calling
        :meth:`convert` with the current role ends it."""
        self._is_permanent = self._is_permanent or permanent
        self._next_role = self.role
        self._drain(now_seconds)

    def convert(self, role: Role, now_seconds: float) -> None:
        """Drain in order to change the role to ``role``. If that is the current role, end a drain
        instead. Idempotent. Raises Invalid for a role that workers can't have, and Unavailable if
        the worker is leaving the cluster permanently."""
        if role not in WORKER_KINDS or not WORKER_KINDS[role].runs_engine:
            roles = list_kinds(conjunction="or", can=lambda kind: kind.runs_engine)
            raise Invalid(
                f"a worker can't become a {role.value}: its role must be {roles}", param="role"
            )
        if self._is_permanent:
            raise Unavailable("the worker is shutting down: its role can't be changed any more")
        self._next_role = role
        if self.state is WorkerState.JOINING:
            self.role = role
        elif role is not self.role:
            self._drain(now_seconds)
        elif self.state is WorkerState.DRAINING:
            self._become_ready()
        self._on_change()

    def finish_role_change(self) -> None:
        """If the worker drains in order to change its role, take the new role and become ready.
        Call this when the worker has no requests left."""
        if self._next_role is not self.role and not self._is_permanent:
            self._become_ready()
            self._on_change()

    def _drain(self, now_seconds: float) -> None:
        if self.state is not WorkerState.DRAINING:
            self._set_state(WorkerState.DRAINING)
            self.draining_since_seconds = now_seconds

    def _become_ready(self) -> None:
        self.role, self.draining_since_seconds = self._next_role, None
        self._set_state(WorkerState.READY)

    def _set_state(self, state: WorkerState) -> None:
        assert state in WORKER_TRANSITIONS[self.state], f"{self.state} → {state}"
        self.state = state
