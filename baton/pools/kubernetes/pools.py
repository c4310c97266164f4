"""Pools in Kubernetes: each is a Deployment (or a StatefulSet), found by labels; a pod is a worker.

The Helm chart labels both the Deployments and their pods with ``app.kubernetes.io/part-of=baton``,
``baton.dev/cluster``, ``baton.dev/role`` and, where a role has several pools, ``baton.dev/pool``;
and sets each worker's id (``BATON_ID``) to its pod's name and UID, as in
``$(POD_NAME).$(POD_UID)``. Sizes are written through the ``scale`` subresource only, and only if it
has not changed since it was read.

**Which pods are removed.** Kubernetes gets the number of pods, and chooses which ones to delete:
pods that are not ready first, then by deletion cost, then the newest. So a pod that is to be
removed (1) gets the lowest deletion cost, (2) is asked to drain, and (3) has drained and
transferred its blocks before (4) the scale is written; (5) then we check which pod was deleted. If
Kubernetes deleted another pod nevertheless (because of a rollout, or a pod that was not ready), the
drained worker serves again; the same happens when the scale could not be written. But a pod that
was given to :meth:`KubernetesPools.remove` is then deleted explicitly, and Kubernetes starts a new
pod, since the pool already has its new size. This costs only time: Kubernetes ends both deleted
pods with SIGTERM, on which a worker drains.

Step (1) marks the pod for removal. An annotation of the pod then also records the pool's size at
that time, so that :meth:`KubernetesPools.remove` can be repeated after any failure without
shrinking the pool twice.

A StatefulSet always deletes its last pod, so only that one can be removed.
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
)
from baton.pools.kubernetes.client import Conflict
from baton.pools.kubernetes.pod import Pod
from baton.pools.kubernetes.pod_drainer import OnProgress, PodDrainer, pod_removal_order
from baton.pools.kubernetes.report import PoolsReport, read_report
from baton.pools.kubernetes.scale import WorkloadScale
from baton.pools.worker_admin import WorkerAdmin

log = structlog.get_logger(__name__)

MAX_ATTEMPTS = 5
"""Maximum number of attempts to write a scale, since a Deployment's version also changes when a pod
becomes ready."""

DRAIN_SECONDS = 30.0


def log_note(text: str) -> None:
    log.warning("pool_resize", message=text)


class KubernetesPools:
    """Implements :class:`baton.pools.base.Pools`, in which all pools of a role count as one;
    :meth:`resize` resizes single pools. Methods also raise the errors of :class:`KubernetesClient`.
    ``on_note`` is called with messages for the administrator. ``chosen_pools`` names, for each role
    that has several pools, the one that :meth:`scale` resizes. ``on_progress`` is called with the
    pods that a method waits for."""

    def __init__(
        self,
        api: KubernetesApi,
        worker_admin: WorkerAdmin,
        clock: Clock,
        on_note: Callable[[str], None] = log_note,
        drain_timeout_seconds: float = DRAIN_SECONDS,
        chosen_pools: Mapping[Role, str] | None = None,
        on_progress: OnProgress = lambda leaving: None,
    ) -> None:
        self._api = api
        self._worker_admin = worker_admin
        self._on_note = on_note
        self._drainer = PodDrainer(
            api, worker_admin, clock, on_note, drain_timeout_seconds, on_progress
        )
        self._chosen_pools = chosen_pools or {}
        self._changing: set[str] = set()

    # -- Pools -----------------------------------------------------------------------------

    async def sizes(self) -> Mapping[Role, int]:
        """Return the number of workers of each role, summed over the role's pools."""
        sizes: Counter[Role] = Counter()
        for workload in (await self._api.workloads()).values():
            sizes[workload.role] += workload.replicas
        return dict(sizes)

    async def pools(self) -> Mapping[str, KubernetesWorkload]:
        """Return all pools by name."""
        return await self._api.workloads()

    async def workers(self) -> list[PoolWorker]:
        return [pod.as_worker() for pod in await self._api.pods()]

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """Set the number of workers of each role. If a role has several pools, only the one in
        ``chosen_pools`` is resized, so that all pools of the role together have that number."""
        pools = await self._api.workloads()
        await self._change(
            pools, [self._size_of_chosen_pool(pools, role, n) for role, n in wanted.items()]
        )

    async def resize(self, wanted: Mapping[str, int]) -> None:
        """Resize pools, each given by its name, or by its role if the role has only one pool.
        Raises Invalid for other names."""
        pools = await self._api.workloads()
        await self._change(pools, [(find_pool(pools, name).pool, n) for name, n in wanted.items()])

    async def remove(self, worker_id: WorkerId) -> None:
        """Remove a worker, given by the name of its pod or by its id."""
        pod = next(
            (each for each in await self._api.pods() if each.has_name_or_id(worker_id)), None
        )
        if pod is None:
            raise NotFound(f"there is no worker {worker_id!r}")
        if not pod.is_active:
            return
        workload = find_pool(await self._api.workloads(), pod.pool)
        with self._exclusive_change(pod.pool):
            scale = await self._api.read_scale(workload)
            if pod.is_marked and scale.replicas < pod.leaves_pool_of:
                await self._drainer.delete_remaining(
                    pod
                )  # the pool is smaller, but another pod was deleted
                return
            others = [each for each in await self._drainer.active(pod.pool) if each.uid != pod.uid]
            _check_removable(pod, workload, scale, others)
            await self._api.check_scale_writable(workload)
            await self._shrink(workload, scale, scale.replicas - 1, [pod], others)
            for each in await self._drainer.active(pod.pool):
                if each.uid == pod.uid:
                    await self._drainer.delete_remaining(pod)

    async def pods(self) -> list[Pod]:
        """Return the pods of all pools, including those that are being deleted."""
        return await self._api.pods()

    async def report(self) -> PoolsReport:
        """Report the pools and pods that the user may read. Raises Forbidden if the user may read
        neither."""
        return await read_report(self._api)

    async def wait_until_gone(self, is_awaited: Callable[[Pod], bool]) -> None:
        """Wait until all pods that are being deleted, and for which ``is_awaited`` returns true,
        are gone. Raises Unavailable if one of them still exists a minute after its grace period."""
        await self._drainer.wait_until_gone(is_awaited)

    async def end_leftover_drains(self) -> None:
        """End the drains that a process left behind because it died while resizing, so that these
        workers serve again."""
        for workload in (await self._api.workloads()).values():
            with self._exclusive_change(workload.pool):
                await self._end_leftover_drains(workload, await self._drainer.active(workload.pool))

    # -- resizing --------------------------------------------------------------------------

    async def _change(
        self, pools: Mapping[str, KubernetesWorkload], wanted: Sequence[tuple[str, int]]
    ) -> None:
        """Resize pools. The pools that shrink are resized first, since the growing pools may need
        the resources that this frees. If the user may not resize one of the pools, none is
        resized."""
        for name, count in wanted:
            if not 0 < count <= MAX_POOL:
                raise Invalid(f"{name}={count}: a pool must have 1 to {MAX_POOL} workers")
        for name, count in wanted:
            if count != pools[name].replicas:
                await self._api.check_scale_writable(pools[name])
        for name, count in sorted(wanted, key=lambda each: each[1] > pools[each[0]].replicas):
            with self._exclusive_change(name):
                await self._resize(pools[name], count)

    def _size_of_chosen_pool(
        self, pools: Mapping[str, KubernetesWorkload], role: Role, count: int
    ) -> tuple[str, int]:
        own = find_pool(pools, self._chosen_pools.get(role, role.value))
        if own.role is not role:
            raise Invalid(f"the pool {own.pool!r} is not a {role.value} pool")
        others = [each for each in pools.values() if each.role is role and each is not own]
        fixed = sum(each.replicas for each in others)
        if others and count <= fixed:
            raise Invalid(
                f"{role.value}={count}: it must be at least {fixed + 1}, since {own.pool} needs "
                f"at least one worker and the other {role.value} pools "
                f"({', '.join(each.pool for each in others)}) have {fixed} in total"
            )
        return own.pool, count - fixed

    async def _resize(self, workload: KubernetesWorkload, count: int) -> None:
        scale = await self._api.read_scale(workload)
        active = await self._drainer.active(workload.pool)
        if count < scale.replicas:
            going = pod_removal_order(workload, active, await self._loads())
            victims = going[: max(len(active) - count, 0)]
            drained = await self._shrink(workload, scale, count, victims, going[len(victims) :])
            await self._drainer.restore_remaining(victims, drained)
            return
        if len(active) <= scale.replicas:
            await self._end_leftover_drains(workload, active)
        if count > scale.replicas:
            await self._write(workload, scale, count)

    async def _end_leftover_drains(
        self, workload: KubernetesWorkload, active: Sequence[Pod]
    ) -> None:
        if len(active) <= workload.replicas:
            for pod in active:
                if pod.is_marked:
                    await self._drainer.end_drain(pod)

    async def _shrink(
        self,
        workload: KubernetesWorkload,
        scale: WorkloadScale,
        count: int,
        victims: Sequence[Pod],
        others: Sequence[Pod],
    ) -> list[Pod]:
        """Drain ``victims`` and write the scale; return the pods that were asked to drain. On
        failure, all ``victims`` serve again."""
        drained: list[Pod] = []
        try:
            for pod in victims:
                await self._api.mark_for_removal(pod, scale.replicas)
            for pod in victims:
                drained.append(pod)  # before the call: if it is cancelled, the result is unknown
                if not await self._drainer.request_drain(pod):
                    drained.remove(pod)
            await self._drainer.wait_until_drained(drained)
            await self._write(workload, scale, count)
        except BaseException:
            await self._drainer.restore_remaining(victims, drained)
            raise
        await self._drainer.wait_until_removed(workload.pool, count, victims, others)
        return drained

    async def _write(self, workload: KubernetesWorkload, base: WorkloadScale, count: int) -> None:
        """Write the scale. Raises Overloaded when the pool was resized by another program since
        ``base`` was read."""
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
            now = await self._api.read_scale(workload)
            if unanswered and now.replicas == count:
                return
            if now.replicas != base.replicas:
                break
            version = now.version
        raise Overloaded(f"somebody else is changing {workload.kind} {workload.name}; try again")

    async def _loads(self) -> Mapping[WorkerId, float]:
        """Return the workers' loads; empty if they are unknown, in which case the newest workers
        are removed."""
        try:
            return await self._worker_admin.loads()
        except BatonError as error:
            self._on_note(f"the newest workers go first, since the loads are unknown: {error}")
            return {}

    @contextmanager
    def _exclusive_change(self, pool: str) -> Iterator[None]:
        if pool in self._changing:
            raise Overloaded(
                f"this process is already changing the {pool} pool; try again when it is done"
            )
        self._changing.add(pool)
        try:
            yield
        finally:
            self._changing.discard(pool)


def find_pool(pools: Mapping[str, KubernetesWorkload], name: str) -> KubernetesWorkload:
    """Return the pool called ``name``, or the only pool of the role ``name``. Raises Invalid if
    there is no such pool, or if the role has several."""
    if name in pools:
        return pools[name]
    of_role = [pool for pool in pools.values() if pool.role.value == name]
    if len(of_role) == 1:
        return of_role[0]
    names = ", ".join(sorted(pool.pool for pool in of_role or pools.values()))
    if of_role:
        raise Invalid(f"there are {len(of_role)} {name} pools; name one of {names}")
    if pools:
        raise Invalid(f"there is no pool {name!r}; the pools are: {names}")
    labels = f"{CLUSTER_LABEL} and {ROLE_LABEL}"
    raise Invalid(f"there is no Deployment or StatefulSet with the labels {labels}")


def _check_removable(
    pod: Pod, workload: KubernetesWorkload, scale: WorkloadScale, others: Sequence[Pod]
) -> None:
    if scale.replicas <= 1:
        raise Invalid(
            f"{pod.name} is the last worker of {workload.pool}; a pool must keep at least one"
        )
    if len(others) + 1 > scale.replicas:
        raise Overloaded(f"the {workload.pool} pool is shrinking at this moment; try again")
    if workload.kind == "StatefulSet" and any(each.ordinal > pod.ordinal for each in others):
        raise Invalid(f"{pod.name}: a StatefulSet can remove only its last pod; use a Deployment")
