"""Watches which pods of a cluster are being deleted.

A worker reports that it drains once SIGTERM has arrived; the API server knows of the deletion as
soon as it is requested. In between, other programs may take the pod for ready: with
``publishNotReadyAddresses``, or while endpoints lag. The result is only a hint: while the API
server can't be reached, everything works as it does without the watch.

Permissions (RBAC): ``list`` and ``watch`` on pods.
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
"""Duration of one watch; the next one continues from its last version."""

SILENT_SECONDS = WATCH_SECONDS + 15.0
"""A connection without data for this long is considered dead, although it was not closed."""

WAIT_SECONDS = (1.0, 2.0, 5.0, 15.0, 30.0)
"""Pauses after the first, second, … failed attempt; the last one is repeated."""

TerminatingWorkers = frozenset[WorkerId]

log = structlog.get_logger(__name__)


class PodWatch:
    """Follows the pods of both roles from a thread of its own, between :meth:`start` and
    :meth:`stop`. ``on_change`` is called from that thread with all workers whose pods are being
    deleted."""

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
        self._thread = threading.Thread(target=self._run, name="pod-watch", daemon=True)
        self._stream: Watch | None = None
        self._last_failure = ""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the watch without waiting for the thread, which may be in a call; it is a daemon."""
        self._stopped.set()
        if self._stream is not None:
            self._stream.stop()  # type: ignore[no-untyped-call]

    def join(self, timeout_seconds: float) -> bool:
        """Wait after :meth:`stop` until the thread has ended, and return whether it has. It ends
        with the next event of its watch, or when its watch ends."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

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
                pass  # the version is too old: list again
            except BatonError as error:
                self._log_failure(str(error))
            seconds = WAIT_SECONDS[min(num_failures, len(WAIT_SECONDS) - 1)]
            num_failures += 1
            self._stopped.wait(seconds)

    def _list(self) -> str:
        """List the pods, publish those that are being deleted, and return the list's version."""
        with self._kubernetes.translated("list", "pods"):
            answer = self._core.list_namespaced_pod(
                self._kubernetes.namespace,
                label_selector=self._selector,
                _request_timeout=CALL_SECONDS,
            )
        self._last_failure = ""
        pods = [self._to_dict(item) for item in answer.items]
        self._publish(frozenset(_worker(pod) for pod in pods if _is_ending(pod)))
        assert answer.metadata is not None
        return answer.metadata.resource_version or ""

    def _to_dict(self, pod: client.V1Pod) -> Mapping[str, Any]:
        """Return the pod in the form of the API server's JSON."""
        plain: Mapping[str, Any] = self._kubernetes.api.sanitize_for_serialization(pod)  # type: ignore[no-untyped-call]
        return plain

    def _follow(self, version: str) -> str:
        """Process changes since ``version`` until the watch ends, and return the last version."""
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

    def _log_failure(self, failure: str) -> None:
        """Log a failure, unless it is the same as the last one."""
        if failure != self._last_failure and not self._stopped.is_set():
            log.warning("pods_not_watched", error=failure)
        self._last_failure = failure


def _is_ending(pod: Mapping[str, Any]) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def _worker(pod: Mapping[str, Any]) -> WorkerId:
    """Return the worker's id, as in :attr:`baton.pools.kubernetes.pod.Pod.id`."""
    return WorkerId(f"{pod['metadata']['name']}.{pod['metadata']['uid']}")
