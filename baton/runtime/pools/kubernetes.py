"""Pools in Kubernetes: a Deployment each (or a StatefulSet), found by labels; a pod is a worker.

Whoever made them (the chart) labels both the Deployments and their pods with
``app.kubernetes.io/part-of=baton``, ``baton.dev/cluster`` and ``baton.dev/role``, and sets each
worker's id (``BATON_ID``) to the name of its pod. Sizes are written through the ``scale``
subresource only, and only if nobody has written in between.

**Who goes.** Kubernetes is told how many pods there should be, not which, and it picks: pods that
are not ready first, then by deletion cost, then the newest. So whoever is to go (1) gets the least
deletion cost, (2) is told to drain, and (3) the scale is written; (4) then we look who went. If it
was another one all the same (a rollout, a pod that was not ready), what was drained can't be used
any more: there is no way back from a drain. Then it is deleted, by name, and the pool, which has
its size already, starts a successor for the one that went in its place. Nothing is lost but
time: both leave as Kubernetes ends pods, by a SIGTERM, on which a worker drains. The same when
the scale could not be written after all: its Deployment replaces it.

A marked pod says of how large a pool it was to leave, so that :meth:`KubernetesPools.remove` can
be asked again after any failure without making the pool smaller twice.

A StatefulSet always takes its last pod, so only that one can be removed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import structlog

from baton.clock import Clock
from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import BatonError, Invalid, NotFound, Overloaded, Unavailable
from baton.runtime.pools.base import MAX_POOL, PoolWorker
from baton.runtime.pools.kubernetes_api import (
    CLUSTER_LABEL,
    ROLE_LABEL,
    Conflict,
    KubernetesApi,
    Scale,
    Workload,
)
from baton.runtime.pools.pod import Pod
from baton.runtime.pools.reach import Reach

log = structlog.get_logger(__name__)

MAX_TRIES = 5
"""Of one write: a Deployment changes with each pod that becomes ready, too."""

SETTLE_SECONDS = 10.0
"""For Kubernetes to pick who goes; it takes well under a second."""

LOOK_SECONDS = 0.25

PHASES = ("Pending", "Unknown", "Running")
"""In the order in which Kubernetes gives pods up."""


def note_in_log(told: str) -> None:
    log.warning("pool", note=told)


class KubernetesPools:
    """Implements :class:`baton.runtime.pools.base.Pools`. Raises what :class:`KubernetesApi` does,
    too. ``on_note`` gets what an operator should know."""

    def __init__(
        self,
        api: KubernetesApi,
        reach: Reach,
        clock: Clock,
        on_note: Callable[[str], None] = note_in_log,
    ) -> None:
        self._api = api
        self._reach = reach
        self._clock = clock
        self._note = on_note
        self._changing: set[Role] = set()

    # -- Pools -----------------------------------------------------------------------------

    async def sizes(self) -> Mapping[Role, int]:
        return {role: pool.replicas for role, pool in (await self._pools()).items()}

    async def workers(self) -> list[PoolWorker]:
        return [pod.as_worker() for pod in await self._api.pods()]

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """A pod that was drained and stayed (something failed in between) is replaced, too."""
        pools = await self._pools()
        for role, count in wanted.items():
            if not 0 < count <= MAX_POOL:
                raise Invalid(f"{role.value}={count}: a pool has 1 to {MAX_POOL} workers")
            self._pool(pools, role)
        for role, count in wanted.items():
            with self._alone(role):
                await self._resize(pools[role], count)

    async def remove(self, worker_id: WorkerId) -> None:
        pod = next((each for each in await self._api.pods() if each.id == worker_id), None)
        if pod is None:
            raise NotFound(f"there is no worker {worker_id!r}")
        if not pod.active:
            return
        workload = self._pool(await self._pools(), pod.role)
        with self._alone(pod.role):
            scale = await self._api.scale_of(workload)
            if pod.marked and scale.replicas < pod.leaves_pool_of:
                await self._replace(pod)  # the pool is smaller already, but somebody else went
                return
            others = [each for each in await self._active(pod.role) if each.uid != pod.uid]
            _check_removable(pod, workload, scale, others)
            await self._shrink(workload, scale, scale.replicas - 1, [pod], others, named=True)

    # -- resizing --------------------------------------------------------------------------

    async def _resize(self, workload: Workload, count: int) -> None:
        scale = await self._api.scale_of(workload)
        active = await self._active(workload.role)
        if count < scale.replicas:
            going = leaving_order(workload, active, await self._loads())
            victims = going[: max(len(active) - count, 0)]
            others = going[len(victims) :]
            await self._shrink(workload, scale, count, victims, others, named=False)
            return
        if len(active) <= scale.replicas:
            for pod in active:
                if pod.marked:
                    await self._replace(pod)
        if count > scale.replicas:
            await self._write(workload, scale, count)

    async def _shrink(
        self,
        workload: Workload,
        scale: Scale,
        count: int,
        victims: Sequence[Pod],
        others: Sequence[Pod],
        named: bool,
    ) -> None:
        """``named``: these and nobody else, whatever it costs."""
        spent: list[Pod] = []
        try:
            for pod in victims:
                await self._api.mark(pod, scale.replicas)
            for pod in victims:
                spent.append(pod)
                if not await self._drained(pod):
                    spent.remove(pod)
            await self._write(workload, scale, count)
        except BaseException:
            await self._restore(victims, spent)
            raise
        await self._settle(workload.role, count, victims, others)
        await self._restore(victims, list(victims) if named else spent)

    async def _write(self, workload: Workload, base: Scale, count: int) -> None:
        """Raises Overloaded when somebody else has resized the pool since ``base``."""
        version = base.version
        for _ in range(MAX_TRIES):
            unanswered = False
            try:
                await self._api.write_scale(workload, Scale(count, version))
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

    async def _drained(self, pod: Pod) -> bool:
        """Whether it was told. One that has not begun, or is dead, takes nothing anyway."""
        try:
            await self._reach.drain(pod.id)
        except BatonError as error:
            if pod.ready:
                self._note(f"{pod.name} could not be told to drain: {error}")
            return False
        return True

    async def _settle(
        self, role: Role, count: int, victims: Sequence[Pod], others: Sequence[Pod]
    ) -> None:
        """Until there are so many, or time is up; tells of those that went by mistake."""
        until = self._clock.monotonic() + SETTLE_SECONDS
        while True:
            there = {pod.uid for pod in await self._active(role)}
            if len(there) <= count or self._clock.monotonic() >= until:
                break
            await self._clock.sleep(LOOK_SECONDS)
        stayed = [pod.name for pod in victims if pod.uid in there]
        went = [pod.name for pod in others if pod.uid not in there]
        if stayed and went:
            self._note(f"{', '.join(went)} went instead of {', '.join(stayed)}")

    async def _restore(self, victims: Sequence[Pod], spent: Sequence[Pod]) -> None:
        """Of those that were to go and are there still: the drained ones are replaced, others are
        as they were. What fails is told, and mended by the next :meth:`scale` or :meth:`remove`."""
        if not victims:
            return
        try:
            there = {pod.uid for pod in await self._active(victims[0].role)}
            for pod in victims:
                if pod.uid in there and pod in spent:
                    await self._replace(pod)
                elif pod.uid in there:
                    await self._api.unmark(pod)
        except NotFound:
            pass
        except BatonError as error:
            self._note(f"{', '.join(pod.name for pod in victims)} may be left drained: {error}")

    async def _replace(self, pod: Pod) -> None:
        """There is no way back from a drain; its pool starts another if one is missing."""
        try:
            await self._api.delete(pod)
        except (NotFound, Conflict):
            return  # it is gone, or another one has its name by now
        self._note(f"{pod.name} was drained and stayed: it is deleted")

    # -- what there is ---------------------------------------------------------------------

    async def _pools(self) -> dict[Role, Workload]:
        pools: dict[Role, Workload] = {}
        for workload in await self._api.workloads():
            if workload.role in pools:
                names = f"{pools[workload.role].name} and {workload.name}"
                raise Invalid(f"two pools are labelled {ROLE_LABEL}={workload.role.value}: {names}")
            pools[workload.role] = workload
        return pools

    def _pool(self, pools: Mapping[Role, Workload], role: Role) -> Workload:
        if role not in pools:
            labels = f"{CLUSTER_LABEL} and {ROLE_LABEL}={role.value}"
            raise Invalid(f"there is no Deployment or StatefulSet with the labels {labels}")
        return pools[role]

    async def _active(self, role: Role) -> list[Pod]:
        return [pod for pod in await self._api.pods() if pod.role is role and pod.active]

    async def _loads(self) -> Mapping[WorkerId, float]:
        """Empty when nobody tells: then the newest go."""
        try:
            return await self._reach.loads()
        except BatonError as error:
            self._note(f"loads are unknown: {error}")
            return {}

    @contextmanager
    def _alone(self, role: Role) -> Iterator[None]:
        if role in self._changing:
            raise Overloaded(f"the {role.value} pool is being changed at this moment; try again")
        self._changing.add(role)
        try:
            yield
        finally:
            self._changing.discard(role)


def leaving_order(
    workload: Workload, pods: Sequence[Pod], loads: Mapping[WorkerId, float]
) -> list[Pod]:
    """As Kubernetes would give them up, but for the load: who has not begun, who was drained
    already, who has least to do, the newest."""
    if workload.kind == "StatefulSet":
        return sorted(pods, key=lambda pod: -pod.ordinal)
    return sorted(
        pods,
        key=lambda pod: (
            bool(pod.node),
            PHASES.index(pod.phase),
            pod.ready,
            not pod.marked,
            loads.get(pod.id, 0.0),
            -pod.created_seconds,
            pod.name,
        ),
    )


def _check_removable(pod: Pod, workload: Workload, scale: Scale, others: Sequence[Pod]) -> None:
    if scale.replicas <= 1:
        raise Invalid(f"{pod.name} is the last {pod.role.value} worker")
    if len(others) + 1 > scale.replicas:
        raise Overloaded(f"the {pod.role.value} pool is shrinking at this moment; try again")
    if workload.kind == "StatefulSet" and any(each.ordinal > pod.ordinal for each in others):
        raise Invalid(f"{pod.name}: a StatefulSet lets only its last pod go; use a Deployment")
