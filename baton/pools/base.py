"""The interface by which ``baton scale`` and the autoscaler control the worker pools, wherever the
workers run.

Growing and shrinking begin at once and take some time; :meth:`Pools.workers` shows the progress. In
every backend, a worker that is removed is drained first: it accepts no new requests, its requests
migrate or end, and then it stops.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from baton.core.ids import WorkerId
from baton.core.states import WORKER_ROLES, Role
from baton.errors import Invalid

MAX_POOL = 256


@dataclass(frozen=True, slots=True)
class PoolWorker:
    """A worker as listed in the pools. ``state`` is starting, serving, converting, draining,
    restarting, pending, stopped or failed. ``role`` of a converting worker is its new role,
    although the worker still drains in its old role. A worker keeps its ``id`` when its role
    changes. ``node`` is the machine's name, empty for this machine. ``message`` is a human-readable
    note on what the worker waits for, or on its progress. ``model`` is the model that it serves,
    empty if the cluster serves one model only."""

    id: WorkerId
    role: Role
    state: str
    node: str = ""
    message: str = ""
    model: str = ""

    @property
    def pool(self) -> str:
        """The name of the worker's pool (:mod:`baton.core.pool_name`)."""
        return f"{self.model}/{self.role.value}" if self.model else self.role.value

    @property
    def is_staying(self) -> bool:
        return self.state not in ("draining", "stopped", "failed")


class Pools(Protocol):
    """The worker pools of one model. Sizes don't count workers that are being removed. All methods
    raise Unavailable when the backend can't be reached."""

    async def sizes(self) -> Mapping[Role, int]:
        """Return the pool sizes that were requested last."""
        ...

    async def workers(self) -> list[PoolWorker]:
        """Return all workers, including those that are starting or being removed."""
        ...

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """Begin to start workers, or to drain the workers with the least load. Raises Invalid for a
        role without a pool or a size out of bounds, and Overloaded while another caller is changing
        the same pool."""
        ...

    async def remove(self, worker_id: WorkerId) -> None:
        """Begin to drain this worker, and reduce the size of its pool by one. Idempotent. Raises
        NotFound for an unknown worker, and Invalid for the last worker of its pool."""
        ...


def parse_pool_sizes(wanted: Mapping[str, int] | Mapping[Role, int]) -> dict[Role, int]:
    """Convert pool sizes keyed by the role's name to sizes keyed by :class:`Role`. Raises Invalid
    for an unknown role or a size out of bounds."""
    for name, count in wanted.items():
        if name not in [role.value for role in WORKER_ROLES] or not 0 < count <= MAX_POOL:
            raise Invalid(
                f"scale takes prefill=N and decode=N with N from 1 to {MAX_POOL}, "
                f"not {name}={count}"
            )
    return {Role(name): count for name, count in wanted.items()}
