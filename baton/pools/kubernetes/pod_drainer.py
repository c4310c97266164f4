"""Removes workers from a pool in Kubernetes: chooses pods and drains their workers, and makes
workers serve again if Kubernetes did not delete their pods."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.clock import Clock
from baton.core.ids import WorkerId
from baton.errors import BatonError, NotFound, Unavailable
from baton.pools.kubernetes.api import KubernetesApi, KubernetesWorkload
from baton.pools.kubernetes.client import Conflict
from baton.pools.kubernetes.pod import Pod
from baton.pools.worker_admin import WorkerAdmin

REMOVAL_TIMEOUT_SECONDS = 10.0
"""Time for Kubernetes to choose the pods that it deletes; it takes well under a second."""

POLL_SECONDS = 0.25

DELETION_POLL_SECONDS = 1.0
"""Interval between two checks of the pods that are being deleted. A check lists all pods."""

OVERDUE_SECONDS = 60.0
"""How long a deleted pod may exist after its grace period, before its node counts as dead."""

REMOVAL_PHASE_ORDER = ("Pending", "Unknown", "Running")
"""Phases of pods, in the order in which Kubernetes deletes pods."""


@dataclass(frozen=True, slots=True)
class LeavingPod:
    """A pod whose worker drains, or that is being deleted. ``num_requests`` is the number of
    requests left; None if the worker can't be asked."""

    pod: Pod
    num_requests: int | None


OnProgress = Callable[[Sequence[LeavingPod]], None]
"""Called at each check with the pods that are waited for."""


class PodDrainer:
    """Drains pods. ``drain_timeout_seconds`` is the maximum time to wait for workers that are busy,
    before the pool is resized."""

    def __init__(
        self,
        api: KubernetesApi,
        worker_admin: WorkerAdmin,
        clock: Clock,
        on_note: Callable[[str], None],
        drain_timeout_seconds: float,
        on_progress: OnProgress = lambda leaving: None,
    ) -> None:
        self._api = api
        self._worker_admin = worker_admin
        self._clock = clock
        self._on_note = on_note
        self._drain_timeout_seconds = drain_timeout_seconds
        self._on_progress = on_progress

    async def request_drain(self, pod: Pod) -> bool:
        """Ask the pod's worker to drain, and return whether the worker was reached. A worker that
        was not reached drains when Kubernetes deletes its pod. A worker that has not started, or is
        dead, has no requests anyway."""
        try:
            await self._worker_admin.drain(pod.id)
        except BatonError as error:
            if pod.is_ready:
                self._on_note(
                    f"{pod.name} drains when Kubernetes deletes it, within {pod.grace_seconds:.0f} "
                    f"s, since it could not be told before: {error}"
                )
            return False
        return True

    async def wait_until_drained(self, pods: Sequence[Pod]) -> None:
        """Wait until all ``pods`` have drained, but at most ``drain_timeout_seconds``. After that,
        the remaining workers still have the grace period of their pods."""
        until, waiting = self._clock.monotonic() + self._drain_timeout_seconds, list(pods)
        while True:
            leaving = [await self._look_at(pod) for pod in waiting]
            waiting = [each.pod for each in leaving if each is not None]
            if not waiting:
                return
            self._on_progress([each for each in leaving if each is not None])
            if self._clock.monotonic() >= until:
                names = ", ".join(pod.name for pod in waiting)
                self._on_note(f"not drained after {self._drain_timeout_seconds:.0f} s: {names}")
                return
            await self._clock.sleep(POLL_SECONDS)

    async def wait_until_removed(
        self, pool: str, count: int, victims: Sequence[Pod], others: Sequence[Pod]
    ) -> None:
        """Wait until the pool has ``count`` pods, but at most :data:`REMOVAL_TIMEOUT_SECONDS`.
        Report which of ``others``, the pool's other pods, were deleted instead of the ``victims``,
        and whether there are still too many pods."""
        until = self._clock.monotonic() + REMOVAL_TIMEOUT_SECONDS
        while True:
            present = {pod.uid for pod in await self.active(pool)}
            if len(present) <= count or self._clock.monotonic() >= until:
                break
            await self._clock.sleep(POLL_SECONDS)
        if len(present) > count:
            self._on_note(
                f"Kubernetes has not reduced {pool} to {count} within "
                f"{REMOVAL_TIMEOUT_SECONDS:.0f} s: it still has {len(present)} workers"
            )
        stayed = [pod.name for pod in victims if pod.uid in present]
        went = [pod.name for pod in others if pod.uid not in present]
        if stayed and went:
            self._on_note(f"Kubernetes deleted {', '.join(went)} instead of {', '.join(stayed)}")

    async def restore_remaining(
        self, victims: Sequence[Pod], asked_to_drain: Sequence[Pod]
    ) -> None:
        """Make those ``victims`` that were not deleted serve again; ``asked_to_drain`` are the
        victims whose workers were asked to drain. Failures are reported, and repaired by the next
        change of the pool."""
        try:
            present = {pod.uid for pod in await self.active(victims[0].pool)} if victims else set()
        except BatonError:
            present = {pod.uid for pod in victims}
        for pod in victims:
            if pod.uid in present:
                await self.end_drain(pod, was_asked_to_drain=pod in asked_to_drain)

    async def end_drain(self, pod: Pod, was_asked_to_drain: bool = True) -> None:
        """End a pod's drain, and then remove the mark that it is to be removed. If the worker can't
        be reached, the mark stays, so that a later attempt ends the drain. Never raises."""
        try:
            if was_asked_to_drain:
                await self._end_worker_drain(pod)
            await self._api.remove_mark(pod)
        except (NotFound, Conflict):
            return  # it is gone, or another pod has its name by now
        except BatonError as error:
            self._on_note(f"{pod.name} may be left drained: {error}")
            return
        if was_asked_to_drain:
            self._on_note(f"{pod.name} was drained but not deleted: it serves again")

    async def _end_worker_drain(self, pod: Pod) -> None:
        try:
            await self._worker_admin.end_drain(pod.id)
        except NotFound:
            return  # it is not in the registry: if it restarts, it serves

    async def delete_remaining(self, pod: Pod) -> None:
        """Delete the pod that was to be removed, after Kubernetes has deleted another one instead.
        Kubernetes then starts a new pod, since the pool would otherwise be one pod too small."""
        try:
            await self._api.delete(pod)
        except (NotFound, Conflict):
            return
        self._on_note(f"{pod.name} was drained but not deleted: it is deleted now")

    async def active(self, pool: str) -> list[Pod]:
        return [pod for pod in await self._api.pods() if pod.pool == pool and pod.is_active]

    async def _look_at(self, pod: Pod) -> LeavingPod | None:
        """Return how many requests the pod's worker has left; None if it has drained, or does not
        answer."""
        try:
            report = await self._worker_admin.drain_report(pod.id)
        except BatonError:
            return None
        return None if report.is_drained else LeavingPod(pod, report.num_requests)

    async def wait_until_gone(self, is_awaited: Callable[[Pod], bool]) -> None:
        """Wait until all pods that are being deleted, and for which ``is_awaited`` returns true,
        are gone. Raises Unavailable if one of them still exists :data:`OVERDUE_SECONDS` after its
        grace period."""
        began = self._clock.monotonic()
        while pods := [p for p in await self._api.pods() if p.is_deleting and is_awaited(p)]:
            seconds = self._clock.monotonic() - began
            for pod in pods:
                if seconds > pod.grace_seconds + OVERDUE_SECONDS:
                    raise Unavailable(
                        f"{pod.name} still exists {seconds:.0f} s after its deletion, although its "
                        f"grace period is {pod.grace_seconds:.0f} s; look at its node, {pod.node}"
                    )
            self._on_progress([await self._look_at_deleted(pod) for pod in pods])
            await self._clock.sleep(DELETION_POLL_SECONDS)

    async def _look_at_deleted(self, pod: Pod) -> LeavingPod:
        try:
            return LeavingPod(pod, (await self._worker_admin.drain_report(pod.id)).num_requests)
        except BatonError:
            return LeavingPod(pod, None)


def pod_removal_order(
    workload: KubernetesWorkload, pods: Sequence[Pod], loads: Mapping[WorkerId, float]
) -> list[Pod]:
    """Return the pods in the order in which to remove them. For a Deployment, the order is
    Kubernetes' own, except that load comes before age: first pods that have not started, then pods
    that are not ready, pods that are already marked for removal, the least loaded pods, and the
    newest pods. For a StatefulSet, the pod with the highest ordinal comes first."""
    if workload.kind == "StatefulSet":
        return sorted(pods, key=lambda pod: -pod.ordinal)
    return sorted(
        pods,
        key=lambda pod: (
            bool(pod.node),
            REMOVAL_PHASE_ORDER.index(pod.phase),
            pod.is_ready,
            not pod.is_marked,
            loads.get(pod.id, 0.0),
            -pod.created_seconds,
            pod.name,
        ),
    )
