"""The pools of workers, wherever they run, as ``baton scale`` and the autoscaler see them.

Growing and shrinking begin at once and take their time: what has become of it is in
:meth:`Pools.workers`. Whoever leaves is drained first, in every backend: it takes nothing new,
what it has moves or ends, and then it goes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Invalid

WORKER_ROLES = (Role.PREFILL, Role.DECODE)
MAX_POOL = 256


@dataclass(frozen=True, slots=True)
class PoolWorker:
    """``state`` is starting, serving, converting, draining, restarting, pending, stopped or failed.
    One that is converting has ``role`` next, and drains from the other. The id is a name: a worker
    keeps it when its role changes. ``node`` is the machine, empty for this one. ``message`` is for
    people: why it waits, how far it is."""

    id: WorkerId
    role: Role
    state: str
    node: str = ""
    message: str = ""

    @property
    def stays(self) -> bool:
        return self.state not in ("draining", "stopped", "failed")


class Pools(Protocol):
    """Sizes are of workers that stay. All methods raise Unavailable when the backend can't be
    reached."""

    async def sizes(self) -> Mapping[Role, int]:
        """What was wanted last."""
        ...

    async def workers(self) -> list[PoolWorker]:
        """Those that are there, those that come, and those that leave."""
        ...

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """Begins to start workers, or to drain those that are least missed. Raises Invalid for a
        role without a pool or a size out of bounds, Overloaded when somebody else is changing the
        same pool at this moment."""
        ...

    async def remove(self, worker_id: WorkerId) -> None:
        """Begins to drain this one; its pool is one smaller from now on. Idempotent. Raises
        NotFound; Invalid for the last of its pool."""
        ...


def parse_pool_sizes(wanted: Mapping[str, int] | Mapping[Role, int]) -> dict[Role, int]:
    """Sizes by role from sizes by name. Raises Invalid."""
    for name, count in wanted.items():
        if name not in [role.value for role in WORKER_ROLES] or not 0 < count <= MAX_POOL:
            raise Invalid(
                f"scale takes prefill=N and decode=N with N from 1 to {MAX_POOL}, "
                f"not {name}={count}"
            )
    return {Role(name): count for name, count in wanted.items()}
