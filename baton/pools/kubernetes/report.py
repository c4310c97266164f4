"""Reports the pools for ``baton status``, as far as the user's permissions allow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.core.states import Role
from baton.errors import BatonError, NotFound
from baton.pools.kubernetes.api import KubernetesApi
from baton.pools.kubernetes.permissions import Forbidden
from baton.pools.kubernetes.pod import Pod


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool's role and size. ``replicas`` is None if the user may not read it."""

    role: Role
    replicas: int | None


@dataclass(frozen=True, slots=True)
class PoolsReport:
    """The pools by name, and their pods. ``refused`` has an error for each permission that the user
    lacks, ``missing`` one for each configured Deployment that does not exist."""

    pools: Mapping[str, PoolSize]
    pods: Sequence[Pod]
    refused: Sequence[Forbidden]
    missing: Sequence[NotFound]

    @property
    def is_ready(self) -> bool:
        """Whether there are pools, none is missing, and each has as many serving workers as it
        should."""
        return (
            bool(self.pools)
            and not self.missing
            and all(
                self._num_serving(name) >= self._num_wanted(name, pool)
                for name, pool in self.pools.items()
            )
        )

    def _num_serving(self, name: str) -> int:
        return sum(pod.pool == name and pod.as_worker().state == "serving" for pod in self.pods)

    def _num_wanted(self, name: str, pool: PoolSize) -> int:
        if pool.replicas is not None:
            return pool.replicas
        return sum(pod.pool == name and pod.is_active for pod in self.pods)


async def read_report(api: KubernetesApi) -> PoolsReport:
    """Read the pools and their pods. Raises Forbidden if the user may read neither pools nor
    pods."""
    errors: list[BatonError] = []
    workloads = await api.workloads(errors.append)
    pools = {name: PoolSize(each.role, each.replicas) for name, each in workloads.items()}
    pods: list[Pod] = []
    try:
        pods = await api.pods()
    except Forbidden as error:
        if errors and not pools:
            raise
        errors.append(error)
    refused = {(e.verb, e.resource): e for e in errors if isinstance(e, Forbidden)}
    if refused:
        for pod in pods:
            pools.setdefault(pod.pool, PoolSize(pod.role, None))
    missing = [error for error in errors if isinstance(error, NotFound)]
    return PoolsReport(pools, pods, list(refused.values()), missing)
