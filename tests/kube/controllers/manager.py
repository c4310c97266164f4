"""All controllers in one thread: whenever anything has changed, each looks at everything.

Slow for a thousand pods, and right for twenty: nothing can be missed, and what was done twice is
done once.
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
    replica_set,
    scheduler,
    stateful_set,
)
from tests.kube.failures import Refused

ALL = (
    deployment, replica_set, stateful_set, job, claims, scheduler, endpoints, budgets, garbage,
)  # fmt: skip
MOST_PASSES = 200
"""Until nothing changes any more; controllers that never agree are a bug."""

GATHER_SECONDS = 0.02
"""That changes are gathered for, before they are looked at."""

TICK_SECONDS = 0.5
"""For what depends on time alone."""


class Controllers:
    """``asleep`` holds modules that do nothing, for tests of what happens then."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.asleep: set[object] = set()
        self.failures: list[str] = []
        self._changed = threading.Event()
        self._over = threading.Event()

    def settle(self) -> None:
        """Until there is nothing to do."""
        for _ in range(MOST_PASSES):
            before = self._api.store.version
            self.look()
            if self._api.store.version == before:
                return
        raise AssertionError("the controllers go on for ever")

    def look(self) -> None:
        """Once each. What another one has changed meanwhile is looked at again."""
        for each in ALL:
            if each in self.asleep:
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
                self.look()
            except Exception:  # told when the cluster ends
                self.failures.append(traceback.format_exc())
