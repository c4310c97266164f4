"""Watches for worker pods that Kubernetes is deleting, so that no requests are placed on them."""

import asyncio
from collections.abc import Callable

from baton.config import Settings
from baton.core.ids import WorkerId
from baton.pools.kubernetes.open import kubernetes_client_for


class TerminatingPodWatcher:
    """Calls ``on_change`` in the event loop with the set of all workers whose pods are being
    deleted, whenever that set changes. The watch starts on construction. Raises Invalid if no API
    server is configured."""

    def __init__(
        self, settings: Settings, on_change: Callable[[frozenset[WorkerId]], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_change = on_change
        self._client = kubernetes_client_for(settings)
        from baton.pools.kubernetes.pod_watch import PodWatch

        self._watch = PodWatch(self._client, settings.cluster, self._forward)
        self._watch.start()

    def close(self) -> None:
        self._watch.stop()
        self._client.close()

    def _forward(self, leaving: frozenset[WorkerId]) -> None:
        """Forward a change to the event loop; called in the watch's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_change, leaving)
