"""How workers leave a pool in Kubernetes: who goes, how they are told, and what becomes of those
that stay after all."""

from collections.abc import Callable, Mapping, Sequence

from baton.clock import Clock
from baton.core.ids import WorkerId
from baton.errors import BatonError, NotFound
from baton.pools.kubernetes.api import KubernetesApi, KubernetesWorkload
from baton.pools.kubernetes.client import Conflict
from baton.pools.kubernetes.pod import Pod
from baton.pools.worker_admin import WorkerAdmin

REMOVAL_TIMEOUT_SECONDS = 10.0
"""For Kubernetes to pick who goes; it takes well under a second."""

LOOK_SECONDS = 0.25

PHASES = ("Pending", "Unknown", "Running")
"""In the order in which Kubernetes gives pods up."""


class PodDrainer:
    """Of one pool's workers. ``drain_seconds`` is how long nobody is deleted for what it has."""

    def __init__(
        self,
        api: KubernetesApi,
        reach: WorkerAdmin,
        clock: Clock,
        on_note: Callable[[str], None],
        drain_seconds: float,
    ) -> None:
        self._api = api
        self._reach = reach
        self._clock = clock
        self._note = on_note
        self._drain_seconds = drain_seconds

    async def tell(self, pod: Pod) -> bool:
        """Whether it was told. One that has not begun, or is dead, takes nothing anyway."""
        try:
            await self._reach.drain(pod.id)
        except BatonError as error:
            if pod.ready:
                self._note(f"{pod.name} could not be told to drain: {error}")
            return False
        return True

    async def until_drained(self, pods: Sequence[Pod]) -> None:
        """Until nothing is left with any of them, or time is up: the rest has its pod's time."""
        until, waiting = self._clock.monotonic() + self._drain_seconds, list(pods)
        while True:
            waiting = [pod for pod in waiting if not await self._is_drained(pod)]
            if not waiting:
                return
            if self._clock.monotonic() >= until:
                names = ", ".join(pod.name for pod in waiting)
                self._note(f"after {self._drain_seconds:.0f} s something is left with {names}")
                return
            await self._clock.sleep(LOOK_SECONDS)

    async def settle(
        self, pool: str, count: int, victims: Sequence[Pod], others: Sequence[Pod]
    ) -> None:
        """Until there are so many, or time is up; tells of those that went by mistake."""
        until = self._clock.monotonic() + REMOVAL_TIMEOUT_SECONDS
        while True:
            there = {pod.uid for pod in await self.active(pool)}
            if len(there) <= count or self._clock.monotonic() >= until:
                break
            await self._clock.sleep(LOOK_SECONDS)
        stayed = [pod.name for pod in victims if pod.uid in there]
        went = [pod.name for pod in others if pod.uid not in there]
        if stayed and went:
            self._note(f"{', '.join(went)} went instead of {', '.join(stayed)}")

    async def restore(self, victims: Sequence[Pod], told: Sequence[Pod]) -> None:
        """Those that were to go and are there still are as they were: whoever was told to drain
        serves again. What fails is noted, and mended by the next change of the pool."""
        try:
            there = {pod.uid for pod in await self.active(victims[0].pool)} if victims else set()
        except BatonError:
            there = {pod.uid for pod in victims}
        for pod in victims:
            if pod.uid in there:
                await self.bring_back(pod, was_told=pod in told)

    async def bring_back(self, pod: Pod, was_told: bool = True) -> None:
        """Its mark goes last: by it, one that could not be told is found later. Never raises."""
        try:
            if was_told:
                await self._stay(pod)
            await self._api.unmark(pod)
        except (NotFound, Conflict):
            return  # it is gone, or another one has its name by now
        except BatonError as error:
            self._note(f"{pod.name} may be left drained: {error}")
            return
        if was_told:
            self._note(f"{pod.name} was drained and stayed: it serves again")

    async def _stay(self, pod: Pod) -> None:
        try:
            await self._reach.stay(pod.id)
        except NotFound:
            return  # nobody announces it: if it lives again, it serves

    async def replace(self, pod: Pod) -> None:
        """It was named, and another one went: its pool starts a successor for that one."""
        try:
            await self._api.delete(pod)
        except (NotFound, Conflict):
            return
        self._note(f"{pod.name} was drained and stayed: it is deleted")

    async def active(self, pool: str) -> list[Pod]:
        return [pod for pod in await self._api.pods() if pod.pool == pool and pod.active]

    async def _is_drained(self, pod: Pod) -> bool:
        """Who does not answer is not waited for."""
        try:
            return await self._reach.is_drained(pod.id)
        except BatonError:
            return True


def pod_removal_order(
    workload: KubernetesWorkload, pods: Sequence[Pod], loads: Mapping[WorkerId, float]
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
