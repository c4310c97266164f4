"""Pools in Kubernetes: a Deployment each (or a StatefulSet), found by labels; a pod is a worker.

Whoever made them (the chart) labels both the Deployments and their pods with
``app.kubernetes.io/part-of=baton``, ``baton.dev/cluster``, ``baton.dev/role`` and, where a role has
several pools, ``baton.dev/pool``; and sets each worker's id (``BATON_ID``) to its pod's name and
UID, as in ``$(POD_NAME).$(POD_UID)``. Sizes are written through the ``scale`` subresource only, and
only if nobody has written in between.

**Who goes.** Kubernetes is told how many pods there should be, not which, and it picks: pods that
are not ready first, then by deletion cost, then the newest. So whoever is to go (1) gets the least
deletion cost, (2) is told to drain, and (3) has done so, its blocks handed over, before (4) the
scale is written; (5) then we look who went. If it was another one all the same (a rollout, a pod
that was not ready), what was drained serves again, as if nothing had been; the same when the scale
could not be written after all. Only where one was named, by :meth:`KubernetesPools.remove`, it is
deleted then, and the pool, which has its size already, starts a successor for the one that went in
its place. Nothing is lost but time: both leave as Kubernetes ends pods, by a preStop hook and a
SIGTERM, on which a worker drains.

A marked pod says of how large a pool it was to leave, so that :meth:`KubernetesPools.remove` can
be asked again after any failure without making the pool smaller twice.

A StatefulSet always takes its last pod, so only that one can be removed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import structlog

from baton.clock import Clock
from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import BatonError, Invalid, NotFound, Overloaded, Unavailable
from baton.pools.base import MAX_POOL, PoolWorker
from baton.pools.kubernetes.api import (
    CLUSTER_LABEL,
    ROLE_LABEL,
    KubernetesApi,
    KubernetesWorkload,
    WorkloadScale,
)
from baton.pools.kubernetes.client import Conflict
from baton.pools.kubernetes.pod import Pod
from baton.pools.kubernetes.pod_drainer import PodDrainer, pod_removal_order
from baton.pools.worker_admin import WorkerAdmin

log = structlog.get_logger(__name__)

MAX_ATTEMPTS = 5
"""Of one write: a Deployment changes with each pod that becomes ready, too."""

DRAIN_SECONDS = 30.0


def log_note(told: str) -> None:
    log.warning("pool", note=told)


class KubernetesPools:
    """Implements :class:`baton.pools.base.Pools`, by roles; :meth:`resize` is by pools.
    Raises what :class:`KubernetesClient` does, too. ``on_note`` gets what an operator should know;
    ``chosen`` says which pool of a role :meth:`scale` resizes, where it has several."""

    def __init__(
        self,
        api: KubernetesApi,
        reach: WorkerAdmin,
        clock: Clock,
        on_note: Callable[[str], None] = log_note,
        drain_seconds: float = DRAIN_SECONDS,
        chosen: Mapping[Role, str] | None = None,
    ) -> None:
        self._api = api
        self._reach = reach
        self._note = on_note
        self._leaving = PodDrainer(api, reach, clock, on_note, drain_seconds)
        self._chosen = chosen or {}
        self._changing: set[str] = set()

    # -- Pools -----------------------------------------------------------------------------

    async def sizes(self) -> Mapping[Role, int]:
        """Of all pools of a role together."""
        sizes: Counter[Role] = Counter()
        for workload in (await self._api.workloads()).values():
            sizes[workload.role] += workload.replicas
        return dict(sizes)

    async def pools(self) -> Mapping[str, KubernetesWorkload]:
        """By their names."""
        return await self._api.workloads()

    async def workers(self) -> list[PoolWorker]:
        return [pod.as_worker() for pod in await self._api.pods()]

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """Of a role with several pools one is resized, and the others count as they are."""
        pools = await self._api.workloads()
        await self._change(pools, [self._share(pools, role, n) for role, n in wanted.items()])

    async def resize(self, wanted: Mapping[str, int]) -> None:
        """By names of pools, or of roles that have one pool. Raises Invalid for others."""
        pools = await self._api.workloads()
        await self._change(pools, [(find_pool(pools, name).pool, n) for name, n in wanted.items()])

    async def remove(self, worker_id: WorkerId) -> None:
        """By the name of its pod, or by its id."""
        pod = next((each for each in await self._api.pods() if each.is_called(worker_id)), None)
        if pod is None:
            raise NotFound(f"there is no worker {worker_id!r}")
        if not pod.active:
            return
        workload = find_pool(await self._api.workloads(), pod.pool)
        with self._alone(pod.pool):
            scale = await self._api.scale_of(workload)
            if pod.marked and scale.replicas < pod.leaves_pool_of:
                await self._leaving.replace(pod)  # the pool is smaller, but somebody else went
                return
            others = [each for each in await self._leaving.active(pod.pool) if each.uid != pod.uid]
            _check_removable(pod, workload, scale, others)
            await self._shrink(workload, scale, scale.replicas - 1, [pod], others)
            for each in await self._leaving.active(pod.pool):
                if each.uid == pod.uid:
                    await self._leaving.replace(pod)

    async def mend(self) -> None:
        """Whoever was left drained by somebody who died in the middle serves again."""
        for workload in (await self._api.workloads()).values():
            with self._alone(workload.pool):
                await self._mend(workload, await self._leaving.active(workload.pool))

    # -- resizing --------------------------------------------------------------------------

    async def _change(
        self, pools: Mapping[str, KubernetesWorkload], wanted: Sequence[tuple[str, int]]
    ) -> None:
        """Those that shrink come first: what they leave may be what the others wait for."""
        for name, count in wanted:
            if not 0 < count <= MAX_POOL:
                raise Invalid(f"{name}={count}: a pool has 1 to {MAX_POOL} workers")
        for name, count in sorted(wanted, key=lambda each: each[1] > pools[each[0]].replicas):
            with self._alone(name):
                await self._resize(pools[name], count)

    def _share(
        self, pools: Mapping[str, KubernetesWorkload], role: Role, count: int
    ) -> tuple[str, int]:
        own = find_pool(pools, self._chosen.get(role, role.value))
        if own.role is not role:
            raise Invalid(f"the pool {own.pool!r} is no {role.value} pool")
        others = [each for each in pools.values() if each.role is role and each is not own]
        fixed = sum(each.replicas for each in others)
        if others and count <= fixed:
            raise Invalid(
                f"{role.value}={count}: {', '.join(each.pool for each in others)} have {fixed}, and"
                f" {own.pool} has at least one"
            )
        return own.pool, count - fixed

    async def _resize(self, workload: KubernetesWorkload, count: int) -> None:
        scale = await self._api.scale_of(workload)
        active = await self._leaving.active(workload.pool)
        if count < scale.replicas:
            going = pod_removal_order(workload, active, await self._loads())
            victims = going[: max(len(active) - count, 0)]
            told = await self._shrink(workload, scale, count, victims, going[len(victims) :])
            await self._leaving.restore(victims, told)
            return
        if len(active) <= scale.replicas:
            await self._mend(workload, active)
        if count > scale.replicas:
            await self._write(workload, scale, count)

    async def _mend(self, workload: KubernetesWorkload, active: Sequence[Pod]) -> None:
        if len(active) <= workload.replicas:
            for pod in active:
                if pod.marked:
                    await self._leaving.bring_back(pod)

    async def _shrink(
        self,
        workload: KubernetesWorkload,
        scale: WorkloadScale,
        count: int,
        victims: Sequence[Pod],
        others: Sequence[Pod],
    ) -> list[Pod]:
        """Those that were told to drain. When it fails, all is as it was."""
        told: list[Pod] = []
        try:
            for pod in victims:
                await self._api.mark(pod, scale.replicas)
            for pod in victims:
                told.append(pod)  # already now: who is interrupted does not know
                if not await self._leaving.tell(pod):
                    told.remove(pod)
            await self._leaving.until_drained(told)
            await self._write(workload, scale, count)
        except BaseException:
            await self._leaving.restore(victims, told)
            raise
        await self._leaving.settle(workload.pool, count, victims, others)
        return told

    async def _write(self, workload: KubernetesWorkload, base: WorkloadScale, count: int) -> None:
        """Raises Overloaded when somebody else has resized the pool since ``base``."""
        version = base.version
        for _ in range(MAX_ATTEMPTS):
            unanswered = False
            try:
                await self._api.write_scale(workload, WorkloadScale(count, version))
                return
            except Conflict:
                pass
            except Unavailable:
                unanswered = True
            now = await self._api.scale_of(workload)
            if unanswered and now.replicas == count:
                return
            if now.replicas != base.replicas:
                break
            version = now.version
        raise Overloaded(f"somebody else is changing {workload.kind} {workload.name}; try again")

    async def _loads(self) -> Mapping[WorkerId, float]:
        """Empty when nobody tells: then the newest go."""
        try:
            return await self._reach.loads()
        except BatonError as error:
            self._note(f"loads are unknown: {error}")
            return {}

    @contextmanager
    def _alone(self, pool: str) -> Iterator[None]:
        if pool in self._changing:
            raise Overloaded(f"the {pool} pool is being changed at this moment; try again")
        self._changing.add(pool)
        try:
            yield
        finally:
            self._changing.discard(pool)


def find_pool(pools: Mapping[str, KubernetesWorkload], name: str) -> KubernetesWorkload:
    """The pool of that name, or the only one of that role. Raises Invalid."""
    if name in pools:
        return pools[name]
    of_role = [pool for pool in pools.values() if pool.role.value == name]
    if len(of_role) == 1:
        return of_role[0]
    names = ", ".join(sorted(pool.pool for pool in of_role or pools.values()))
    if of_role:
        raise Invalid(f"{name} is {len(of_role)} pools; name one of {names}")
    if pools:
        raise Invalid(f"there is no pool {name!r}; there are {names}")
    labels = f"{CLUSTER_LABEL} and {ROLE_LABEL}"
    raise Invalid(f"there is no Deployment or StatefulSet with the labels {labels}")


def _check_removable(
    pod: Pod, workload: KubernetesWorkload, scale: WorkloadScale, others: Sequence[Pod]
) -> None:
    if scale.replicas <= 1:
        raise Invalid(f"{pod.name} is the last worker of {workload.pool}")
    if len(others) + 1 > scale.replicas:
        raise Overloaded(f"the {workload.pool} pool is shrinking at this moment; try again")
    if workload.kind == "StatefulSet" and any(each.ordinal > pod.ordinal for each in others):
        raise Invalid(f"{pod.name}: a StatefulSet lets only its last pod go; use a Deployment")
