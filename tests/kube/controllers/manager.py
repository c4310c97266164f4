"""Runs all controllers in one thread. After any change, each controller reconciles all objects.

This would be too slow for a thousand pods, but it is fast enough for twenty, and no change can be
missed.
"""

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from tests.kube.api import Api
from tests.kube.controllers import (
    budgets,
    claims,
    deployment,
    endpoints,
    garbage,
    job,
    pod_autoscaler,
    quotas,
    replica_set,
    scheduler,
    stateful_set,
)
from tests.kube.failures import Refused

ALL = (
    pod_autoscaler, deployment, replica_set, stateful_set, job, claims, scheduler, endpoints,
    budgets, quotas, garbage,
)  # fmt: skip
MOST_PASSES = 200
"""The maximum number of passes until nothing changes any more. If there are more, the controllers
have a bug."""

GATHER_SECONDS = 0.02
"""How long changes are collected before the controllers run."""

TICK_SECONDS = 0.5
"""The longest time between two runs of the controllers, for changes that depend only on time."""


class Controllers:
    """Runs the controllers. Tests disable some by adding their modules to ``disabled``."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.disabled: set[object] = set()
        self.failures: list[str] = []
        self._changed = threading.Event()
        self._over = threading.Event()

    def settle(self) -> None:
        """Run all controllers until none of them changes an object. Raises AssertionError if they
        still change objects after MOST_PASSES passes."""
        for _ in range(MOST_PASSES):
            before = self._api.store.version
            self.reconcile_once()
            if self._api.store.version == before:
                return
        raise AssertionError(f"the controllers still change objects after {MOST_PASSES} passes")

    def reconcile_once(self) -> None:
        """Run each controller once. Controllers that run earlier see the changes of later ones only
        in the next pass."""
        for each in ALL:
            if each in self.disabled:
                continue
            try:
                with self._api.store.locked():
                    each.reconcile(self._api)
            except Refused as refused:
                if refused.code not in (404, 409):
                    raise

    @contextmanager
    def running(self) -> Iterator[None]:
        self._api.store.listen(self._changed.set)
        thread = threading.Thread(target=self._run, name="controllers")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._changed.set()
            thread.join()
        assert not self.failures, self.failures[0]

    def _run(self) -> None:
        while not self._over.is_set():
            if self._changed.wait(TICK_SECONDS):
                self._over.wait(GATHER_SECONDS)
            self._changed.clear()
            try:
                self.reconcile_once()
            except Exception:  # reported when the cluster stops
                self.failures.append(traceback.format_exc())
