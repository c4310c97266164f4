"""From the pods that Kubernetes deletes to the workers on which nothing is placed any more."""

import asyncio
from collections.abc import Callable

from baton.config import Settings
from baton.core.ids import WorkerId
from baton.pools.kubernetes.open import kubernetes_client_for


class TerminatingPodWatcher:
    """From its making on, ``on_change`` is called in the event loop with all workers whose pods are
    being deleted. Raises Invalid where there is no way to an API server."""

    def __init__(
        self, settings: Settings, on_change: Callable[[frozenset[WorkerId]], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_change = on_change
        self._client = kubernetes_client_for(settings)
        from baton.pools.kubernetes.pod_watch import PodWatch

        self._watch = PodWatch(self._client, settings.cluster, self._tell)
        self._watch.start()

    def close(self) -> None:
        self._watch.stop()
        self._client.close()

    def _tell(self, leaving: frozenset[WorkerId]) -> None:
        """From the watch's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_change, leaving)
