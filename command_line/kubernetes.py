"""``baton scale`` and ``baton drain`` for a cluster that runs in Kubernetes."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from baton.clock import Clock, SystemClock
from baton.config import Settings
from baton.errors import Invalid, Unauthorized
from baton.pools.kubernetes.open import OpenKubernetesCluster, open_kubernetes_cluster
from baton.pools.kubernetes.permissions import Forbidden
from command_line.status_line import StatusLine

if TYPE_CHECKING:
    from baton.pools.kubernetes.pod import Pod
    from baton.pools.kubernetes.pod_drainer import LeavingPod


def scale(
    settings: Settings, sizes: list[str], wait: bool = True, clock: Clock | None = None
) -> None:
    """Resize pools. ``sizes`` are like decode-big=2. With ``wait``, return once the pods of removed
    workers are gone; new workers are not waited for. Raises NotFound if there is no such cluster,
    Unauthorized if RBAC forbids it, and the errors of :class:`KubernetesPools`."""
    wanted = parse_named_pool_sizes(sizes)
    change = _Change(settings, clock or SystemClock())

    async def run() -> None:
        async with change.open_cluster() as cluster:
            # Needs the extra `kubernetes`; open_cluster() has checked that it is installed.
            from baton.pools.kubernetes.pools import find_pool

            print(cluster.location, flush=True)
            pools = await cluster.existing_pools()
            found = {find_pool(pools, name).pool: count for name, count in wanted.items()}
            change.resized = {n: f"{n} {pools[n].replicas} → {found[n]}" for n in found}
            before = {pod.uid for pod in await cluster.pools.pods() if pod.is_deleting}
            await cluster.pools.resize(found)
            change.is_written = True
            if wait:
                await cluster.pools.wait_until_gone(
                    lambda pod: pod.pool in found and pod.uid not in before
                )

    if change.run(run):
        print(", ".join(change.resized.values()) + (": done" if wait else ""))


def drain(settings: Settings, worker: str, wait: bool = True, clock: Clock | None = None) -> None:
    """Drain and remove a worker. ``worker`` is its pod's name, or its id. With ``wait``, return
    once its pod is gone. Raises Invalid for an unknown worker, and the errors of :func:`scale`."""
    change = _Change(settings, clock or SystemClock())

    async def run() -> None:
        async with change.open_cluster() as cluster:
            print(cluster.location, flush=True)
            pods = await cluster.pools.pods()
            if not pods:
                await cluster.existing_pools()
            pod = _find_worker(pods, worker)
            await cluster.pools.remove(pod.id)
            change.is_written = True
            if wait:
                await cluster.pools.wait_until_gone(lambda each: each.uid == pod.uid)

    if change.run(run):
        print(f"{worker} is {'gone' if wait else 'being deleted'}")


class _Change:
    """A change of pools, and the display of its progress. ``resized`` describes for each pool how
    the size changes; ``is_written`` says whether Kubernetes has accepted the new sizes."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.resized: Mapping[str, str] = {}
        self.is_written = False
        self._settings = settings
        self._clock = clock
        self._began = clock.monotonic()
        self._line: StatusLine | None = None

    def open_cluster(self) -> AbstractAsyncContextManager[OpenKubernetesCluster]:
        return open_kubernetes_cluster(self._settings, self._clock, print_note, self._show)

    def run(self, work: Callable[[], Coroutine[None, None, None]]) -> bool:
        """Run ``work``. Return True if it has completed, and False if Ctrl-C interrupted it after
        the sizes were written: Kubernetes then continues the change. If Ctrl-C comes before that,
        the workers that were drained serve again, and KeyboardInterrupt is raised. Raises
        Unauthorized if Kubernetes forbids a call."""
        try:
            asyncio.run(work())
        except Forbidden as error:
            # Only pods are deleted after the sizes were written, so another refused call means
            # that nothing was changed.
            unchanged = "" if error.verb == "delete" else "nothing was changed"
            text = "; ".join(filter(None, [str(error), error.hint, unchanged]))
            raise Unauthorized(text) from error
        except KeyboardInterrupt:
            if not self.is_written:
                raise
            print_note("Kubernetes continues to remove pods: see `baton status --on kubernetes`")
            return False
        finally:
            if self._line is not None:
                self._line.close()
        return True

    def _show(self, leaving: "Sequence[LeavingPod]") -> None:
        self._line = self._line or StatusLine()
        pools = dict.fromkeys(each.pod.pool for each in leaving)
        parts = [self._describe_pool(p, [e for e in leaving if e.pod.pool == p]) for p in pools]
        self._line.show("; ".join(parts), self._clock.monotonic() - self._began)

    def _describe_pool(self, pool: str, leaving: "Sequence[LeavingPod]") -> str:
        size = f"{self.resized[pool]}: " if pool in self.resized else ""
        return size + ", ".join(_describe_leaving(each) for each in leaving)


def _describe_leaving(leaving: "LeavingPod") -> str:
    name, count = leaving.pod.name, leaving.num_requests
    if count:
        verb, note = "draining", f": {count} request{'s' * (count != 1)} left"
    elif leaving.pod.is_deleting:
        verb, note = "deleting", "" if count == 0 else ", which drains first"
    else:
        verb, note = "draining", ""
    return f"{verb} {name}{note}"


def _find_worker(pods: "Sequence[Pod]", worker: str) -> "Pod":
    for pod in pods:
        if pod.has_name_or_id(worker):
            return pod
    names = ", ".join(pod.name for pod in pods) or "none"
    raise Invalid(f"there is no worker {worker!r}; the workers are: {names}")


def parse_named_pool_sizes(texts: list[str]) -> dict[str, int]:
    """Parse texts like ``decode=3`` into sizes by pool name. Raises Invalid for any other text."""
    wanted: dict[str, int] = {}
    for text in texts:
        name, _, count = text.partition("=")
        if not name or not count.isdecimal():
            raise Invalid(f"scale takes POOL=N, as in decode=3, not {text}")
        wanted[name] = int(count)
    return wanted


def print_note(note: str) -> None:
    print(f"baton: {note}", file=sys.stderr)
