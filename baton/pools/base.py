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
from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS, list_kinds, serving_problem
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
        role without a pool, a size out of bounds, or sizes with which the remaining workers could
        not serve requests, and Overloaded while another caller is changing
        the same pool."""
        ...

    async def remove(self, worker_id: WorkerId) -> None:
        """Begin to drain this worker, and reduce the size of its pool by one. Idempotent. Raises
        NotFound for an unknown worker, and Invalid for the last worker of its pool, unless the
        other pools can serve requests without it."""
        ...


def parse_pool_sizes(wanted: Mapping[str, int] | Mapping[Role, int]) -> dict[Role, int]:
    """Convert pool sizes keyed by the role's name to sizes keyed by :class:`Role`. Raises Invalid
    for an unknown role or a size out of bounds."""
    for name, count in wanted.items():
        if name not in WORKER_KINDS or not 0 <= count <= MAX_POOL:
            raise Invalid(
                f"scale takes {list_kinds('{}=N')} with N from 0 to {MAX_POOL}, not {name}={count}"
            )
    return {Role(name): count for name, count in wanted.items()}


def check_can_serve(sizes: Mapping[Role, int]) -> None:
    """Raise Invalid if requests can't be served by pools of these sizes."""
    if problem := serving_problem(sizes):
        raise Invalid(problem)
