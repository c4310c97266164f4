"""Runs a container: starts, probes, restarts and stops it."""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.kube.kinds import Object
from tests.kube.node.environment import Missing
from tests.kube.node.probes import Probing, run_probe
from tests.kube.node.process import ContainerProcess
from tests.kube.node.root import Identity
from tests.kube.node.sandbox import Sandbox

FIRST_BACKOFF_SECONDS, MOST_BACKOFF_SECONDS = 1.0, 20.0
"""The first and longest delay before a restart. A real kubelet's (10 and 300 s) are too slow for
tests."""

FAILED = 128
"""The exit code of a container that couldn't be started."""

REAP_SECONDS = 10.0
"""The longest time that a killed process may take to exit."""

Emit = Callable[[str, str], None]
"""Records an event with a reason and a message."""


@dataclass
class State:
    """A container's state, as in the pod's status."""

    waiting: str = "ContainerCreating"
    why: str = ""
    running_since: str = ""
    exit_code: int | None = None
    reason: str = ""
    finished: str = ""
    restarts: int = 0
    started: bool = False
    ready: bool = False
    last: Object = field(default_factory=dict)

    def as_json(self) -> Object:
        if self.running_since:
            return {"running": {"startedAt": self.running_since}}
        if self.waiting:
            waiting = {"reason": self.waiting}
            return {"waiting": waiting | ({"message": self.why} if self.why else {})}
        return self.terminated

    @property
    def terminated(self) -> Object:
        ended: Object = {"exitCode": self.exit_code, "reason": self.reason}
        return {"terminated": ended | {"finishedAt": self.finished}}


@dataclass(frozen=True)
class StartSpec:
    """Everything that is needed to start a container: the script that sets up its file system and
    runs its command, its environment, and its user."""

    script: str
    environment: Mapping[str, str]
    identity: Identity


class Container:
    """A container. ``make_spec`` is called before each start, and ``changed`` whenever ``state``
    has changed. ``stamp`` returns the current time, and ``emit`` records an event of the pod."""

    def __init__(
        self,
        spec: Object,
        sandbox: Sandbox,
        log: Path,
        make_spec: Callable[[], StartSpec],
        stamp: Callable[[], str],
        changed: Callable[[], None],
        emit: Emit,
    ) -> None:
        self.spec = spec
        self.state = State()
        self.log = log
        self._sandbox = sandbox
        self._make_spec = make_spec
        self._stamp = stamp
        self._changed = changed
        self._emit = emit
        self.process: ContainerProcess | None = None
        self._leaving = False

    async def run(self, policy: str) -> None:
        """Run the container. When it exits, restart it if the restart ``policy`` (Always, OnFailure
        or Never) says so. Return when it is not restarted any more, or was stopped."""
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            try:
                code = await self._once()
            except (Missing, ValueError) as error:  # e.g. a ConfigMap that was deleted meanwhile
                self._emit("Failed", f"Error: {error}")
                code = FAILED
            again = policy == "Always" or (policy == "OnFailure" and code != 0)
            if self._leaving or not again:
                return
            self.state.waiting = "CrashLoopBackOff" if self.state.restarts else "Restarting"
            self.state.why = f"back-off {backoff:g}s restarting failed container"
            self.state.last = self.state.terminated
            self.state.restarts += 1
            self._emit("BackOff", self.state.why)
            self._changed()
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, MOST_BACKOFF_SECONDS)
            if self._leaving:
                return

    async def _once(self) -> int:
        start = self._make_spec()
        process = self.process = await ContainerProcess.start(
            self._sandbox, start.script, start.environment, start.identity.command(), self.log
        )
        self.state.waiting = self.state.why = ""
        self.state.running_since, self.state.exit_code = self._stamp(), None
        self.state.started = "startupProbe" not in self.spec
        self.state.ready = self.state.started and "readinessProbe" not in self.spec
        self._emit("Started", f"Started container {self.spec['name']}")
        self._changed()
        watching = asyncio.create_task(self._watch())
        try:
            code = await process.wait()
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        self._ended(code)
        return code

    def _ended(self, code: int) -> None:
        state = self.state
        state.running_since, state.finished = "", self._stamp()
        state.exit_code, state.reason = code, "Completed" if code == 0 else "Error"
        state.started = state.ready = False
        self._changed()

    # -- probes ----------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Run the probes, and stop the container if its startup or liveness probe fails."""
        if "startupProbe" in self.spec:
            if not await self._probing("startup").run():
                await self._kill("startup probe failed")
                return
            self.state.started = True
            self.state.ready = "readinessProbe" not in self.spec
            self._changed()
        kinds = [kind for kind in ("readiness", "liveness") if f"{kind}Probe" in self.spec]
        async with asyncio.TaskGroup() as group:
            for kind in kinds:
                group.create_task(self._keep(kind))

    async def _keep(self, kind: str) -> None:
        await self._probing(kind).run()
        await self._kill(f"{kind} probe failed")

    async def _kill(self, why: str) -> None:
        if not self._leaving:
            self._emit("Killing", f"Container {self.spec['name']}: {why}; it will be restarted")
            await self.stop(self.grace, for_good=False)

    def _probing(self, kind: str) -> Probing:
        return Probing(kind, self.spec[f"{kind}Probe"], self._check, self._on_verdict)

    async def _check(self, probe: Object) -> str:
        if self._leaving and probe is not self.spec.get("readinessProbe"):
            return ""  # a stopping container is not restarted by its probes
        return await run_probe(probe, self.spec, self._sandbox.address, self.execute)

    def _on_verdict(self, kind: str, good: bool, why: str) -> None:
        if why:
            self._emit("Unhealthy", f"{kind.capitalize()} probe failed: {why}")
        if kind == "readiness" and self.state.ready != good:
            self.state.ready = good
            self._changed()

    async def execute(self, command: Sequence[str]) -> int:
        """Run another command in the container, for a probe or a test."""
        assert self.process is not None, "the container was never started"
        return await self.process.execute(command, self.log)

    # -- stopping --------------------------------------------------------------------------

    grace = 30.0
    """The pod's grace period in seconds."""

    async def stop(self, seconds: float, for_good: bool = True) -> None:
        """Send SIGTERM and wait for the process to exit. If this takes more than ``seconds``, send
        SIGKILL. If ``for_good`` is not set, the container may then be restarted, as its restart
        policy says."""
        self._leaving = self._leaving or for_good
        process = self.process
        if process is None or not process.alive:
            return
        try:
            async with asyncio.timeout(seconds):
                process.signal(signal.SIGTERM)
                await process.wait()
        except TimeoutError:
            self._emit("Killing", f"Container {self.spec['name']} exceeded its grace period")
            await self.kill()

    async def kill(self) -> None:
        self._leaving = True
        if self.process is not None:
            self.process.signal(signal.SIGKILL)
            async with asyncio.timeout(REAP_SECONDS):
                await self.process.wait()
