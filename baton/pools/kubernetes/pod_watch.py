"""Which pods of a cluster are being deleted, as the API server tells it.

A worker says itself that it drains, once its pod's preStop hook or SIGTERM has come to it; the API
server knows as soon as it was decided. With ``publishNotReadyAddresses``, or while endpoints lag,
such a pod still reads as ready elsewhere. It is a hint: who can't be reached says nothing, and all
goes on as without it.

Rights (RBAC): ``list`` and ``watch`` on pods.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import structlog
from kubernetes import client
from kubernetes.watch import Watch

from baton.core.ids import WorkerId
from baton.errors import BatonError
from baton.pools.kubernetes.api import label_selector
from baton.pools.kubernetes.client import CALL_SECONDS, KubernetesClient, ResourceExpired

WATCH_SECONDS = 60
"""Of one watch; the next one goes on from its last version."""

SILENT_SECONDS = WATCH_SECONDS + 15.0
"""For a connection that says nothing: it is dead, though nobody has closed it."""

WAIT_SECONDS = (1.0, 2.0, 5.0, 15.0, 30.0)
"""Before another attempt, after so many that failed; the last one stays."""

TerminatingWorkers = frozenset[WorkerId]

log = structlog.get_logger(__name__)


class PodWatch:
    """Follows the pods of both roles from a thread of its own: :meth:`start`, then :meth:`stop`.
    ``on_change`` is called from that thread with all workers whose pods are being deleted."""

    def __init__(
        self,
        kubernetes: KubernetesClient,
        cluster: str,
        on_change: Callable[[TerminatingWorkers], None],
    ) -> None:
        self._kubernetes = kubernetes
        self._core = client.CoreV1Api(kubernetes.api)
        self._selector = label_selector(cluster)
        self._on_change = on_change
        self._ending: TerminatingWorkers = frozenset()
        self._stopped = threading.Event()
        self._stream: Watch | None = None
        self._told = ""

    def start(self) -> None:
        threading.Thread(target=self._run, name="pod-watch", daemon=True).start()

    def stop(self) -> None:
        """Does not wait: the thread may sit in a call, and dies with the process."""
        self._stopped.set()
        if self._stream is not None:
            self._stream.stop()  # type: ignore[no-untyped-call]

    # -- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        num_failures = 0
        while not self._stopped.is_set():
            try:
                version = self._list()
                while not self._stopped.is_set():
                    version = self._follow(version)
                    num_failures = 0
            except ResourceExpired:
                pass  # the version is too old: what there is now comes next
            except BatonError as error:
                self._tell(str(error))
            seconds = WAIT_SECONDS[min(num_failures, len(WAIT_SECONDS) - 1)]
            num_failures += 1
            self._stopped.wait(seconds)

    def _list(self) -> str:
        """What there is now; its version."""
        with self._kubernetes.translated("list", "pods"):
            answer = self._core.list_namespaced_pod(
                self._kubernetes.namespace,
                label_selector=self._selector,
                _request_timeout=CALL_SECONDS,
            )
        self._told = ""
        pods = [self._plain(item) for item in answer.items]
        self._publish(frozenset(_worker(pod) for pod in pods if _is_ending(pod)))
        assert answer.metadata is not None
        return answer.metadata.resource_version or ""

    def _plain(self, pod: client.V1Pod) -> Mapping[str, Any]:
        """As the API server told it."""
        plain: Mapping[str, Any] = self._kubernetes.api.sanitize_for_serialization(pod)  # type: ignore[no-untyped-call]
        return plain

    def _follow(self, version: str) -> str:
        """Changes since ``version``, until the watch ends; the version of the last one."""
        for kind_of, pod in self._events(version):
            version = pod["metadata"]["resourceVersion"]
            if kind_of == "DELETED":
                self._publish(self._ending - {_worker(pod)})
            elif kind_of != "BOOKMARK" and _is_ending(pod):
                self._publish(self._ending | {_worker(pod)})
        return version

    def _events(self, version: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        stream = self._stream = Watch()  # type: ignore[no-untyped-call]
        with self._kubernetes.translated("watch", "pods"):
            events = stream.stream(  # type: ignore[no-untyped-call]
                self._core.list_namespaced_pod,
                self._kubernetes.namespace,
                label_selector=self._selector,
                resource_version=version,
                timeout_seconds=WATCH_SECONDS,
                allow_watch_bookmarks=True,
                _request_timeout=(CALL_SECONDS, SILENT_SECONDS),
            )
            for event in events:
                if event is not None:
                    yield event["type"], event["raw_object"]

    def _publish(self, ending: TerminatingWorkers) -> None:
        if ending != self._ending:
            self._ending = ending
            self._on_change(ending)

    def _tell(self, failure: str) -> None:
        """Once, until all is well again."""
        if failure != self._told and not self._stopped.is_set():
            log.warning("pods_not_watched", failure=failure)
        self._told = failure


def _is_ending(pod: Mapping[str, Any]) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def _worker(pod: Mapping[str, Any]) -> WorkerId:
    """As :attr:`Pod.id`."""
    return WorkerId(f"{pod['metadata']['name']}.{pod['metadata']['uid']}")
