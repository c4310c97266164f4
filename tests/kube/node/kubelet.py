"""The kubelet. In a thread with its own event loop, it runs the pods, and a process that forwards
connections to services and answers DNS queries."""

import asyncio
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tests.kube.failures import Refused, not_found
from tests.kube.kinds import POD
from tests.kube.node.pod import Node, PodRunner
from tests.kube.node.services import Services
from tests.kube.pods import FINISHED, is_being_deleted, phase

GATHER_SECONDS = 0.02
"""How long changes are collected before they are handled."""

TICK_SECONDS = 1.0


class Kubelet:
    """A kubelet that is responsible for all nodes of the cluster."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._runners: dict[str, PodRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = False
        self._up = threading.Event()
        self.failures: list[str] = []

    @contextmanager
    def running(self) -> Iterator["Kubelet"]:
        """Run the kubelet while the ``with`` block runs, and kill all containers at the end. Raises
        AssertionError if the kubelet has failed."""
        thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="kubelet")
        thread.start()
        self._up.wait()
        try:
            yield self
        finally:
            self._over = True
            self._poke()
            thread.join()
        assert not self.failures, self.failures[0]

    def runner(self, namespace: str, name: str) -> PodRunner:
        """Return the runner of a pod. Raises Refused (404)."""
        found = self._node.api.store.get(POD, namespace, name)
        runner = self._runners.get(found["metadata"]["uid"])
        if runner is None:
            raise not_found(POD, name)
        return runner

    def log(self, namespace: str, pod: str, container: str) -> str:
        """Return a container's log. Raises Refused (404)."""
        return self.runner(namespace, pod).log(container)

    def exec_command(
        self, namespace: str, pod: str, container: str, command: Sequence[str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """Return a command line for this machine that runs ``command`` in a container, and its
        environment. Raises Refused (404, or 400 if the container isn't running)."""
        return self.runner(namespace, pod).exec_command(container, command)

    # -- the event loop --------------------------------------------------------------------

    def _poke(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._node.api.store.listen(self._poke)
        services = Services(self._node.api, self._node.network)
        try:
            await services.start()
            self._up.set()
            while not self._over:
                self._look()
                await services.update()
                await self._next()
        except Exception:  # reported when the cluster stops
            self.failures.append(traceback.format_exc())
        finally:
            self._up.set()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await services.stop()

    async def _next(self) -> None:
        try:
            async with asyncio.timeout(TICK_SECONDS):
                await self._changed.wait()
                await asyncio.sleep(GATHER_SECONDS)
        except TimeoutError:
            pass
        self._changed.clear()

    def _look(self) -> None:
        for pod in self._node.api.store.all(POD):
            uid = pod["metadata"]["uid"]
            if uid in self._runners:
                if is_being_deleted(pod):
                    self._runners[uid].leave(pod)
            elif (
                pod["spec"].get("nodeName")
                and not is_being_deleted(pod)
                and phase(pod) not in FINISHED
            ):
                self._runners[uid] = PodRunner(self._node, pod)
                self._tasks[uid] = asyncio.create_task(self._keep(uid))

    async def _keep(self, uid: str) -> None:
        try:
            await self._runners[uid].run()
        except (Exception, Refused):  # reported when the cluster stops
            self.failures.append(traceback.format_exc())
        finally:
            self._runners.pop(uid)
            self._tasks.pop(uid)
