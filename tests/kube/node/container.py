"""A container's life: started, probed, started again, stopped."""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.kube.kinds import Object
from tests.kube.node.environment import Missing
from tests.kube.node.probes import Probing, port_of, probed
from tests.kube.node.process import ContainerProcess
from tests.kube.node.root import Identity
from tests.kube.node.sandbox import Sandbox

FIRST_BACKOFF_SECONDS, MOST_BACKOFF_SECONDS = 1.0, 20.0
"""A real kubelet's are 10 and 300; a test hasn't the time."""

FAILED = 128
"""The exit code of what couldn't be started."""

REAP_SECONDS = 10.0
"""That a killed process may take to go."""

Told = Callable[[str, str], None]
"""Reason, message: an event."""


@dataclass
class State:
    """What a pod's status says of a container."""

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
            told = {"reason": self.waiting}
            return {"waiting": told | ({"message": self.why} if self.why else {})}
        return self.terminated

    @property
    def terminated(self) -> Object:
        ended: Object = {"exitCode": self.exit_code, "reason": self.reason}
        return {"terminated": ended | {"finishedAt": self.finished}}


@dataclass(frozen=True)
class Recipe:
    """All that it takes to start one: the script of its file system and command, and its
    environment."""

    script: str
    environment: Mapping[str, str]
    identity: Identity


class Container:
    """``recipe`` is asked for before each start; ``changed`` is called whenever ``state`` has
    changed. ``stamp`` tells the time."""

    def __init__(
        self,
        spec: Object,
        sandbox: Sandbox,
        log: Path,
        recipe: Callable[[], Recipe],
        stamp: Callable[[], str],
        changed: Callable[[], None],
        told: Told,
    ) -> None:
        self.spec = spec
        self.state = State()
        self.log = log
        self._sandbox = sandbox
        self._recipe = recipe
        self._stamp = stamp
        self._changed = changed
        self._told = told
        self.process: ContainerProcess | None = None
        self._leaving = False

    async def run(self, policy: str) -> None:
        """Until it has ended for good: by ``policy`` (Always, OnFailure, Never), or because it was
        stopped."""
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            try:
                code = await self._once()
            except (Missing, ValueError) as error:  # since it was started before
                self._told("Failed", f"Error: {error}")
                code = FAILED
            again = policy == "Always" or (policy == "OnFailure" and code != 0)
            if self._leaving or not again:
                return
            self.state.waiting = "CrashLoopBackOff" if self.state.restarts else "Restarting"
            self.state.why = f"back-off {backoff:g}s restarting failed container"
            self.state.last = self.state.terminated
            self.state.restarts += 1
            self._told("BackOff", self.state.why)
            self._changed()
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, MOST_BACKOFF_SECONDS)
            if self._leaving:
                return

    async def _once(self) -> int:
        recipe = self._recipe()
        process = self.process = await ContainerProcess.start(
            self._sandbox, recipe.script, recipe.environment, recipe.identity.command(), self.log
        )
        self.state.waiting = self.state.why = ""
        self.state.running_since, self.state.exit_code = self._stamp(), None
        self.state.started = "startupProbe" not in self.spec
        self.state.ready = self.state.started and "readinessProbe" not in self.spec
        self._told("Started", f"Started container {self.spec['name']}")
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
        """Raises nothing; a container that fails for good is killed."""
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
            self._told("Killing", f"Container {self.spec['name']}: {why}; it will be restarted")
            await self.stop(self.grace, for_good=False)

    def _probing(self, kind: str) -> Probing:
        return Probing(kind, self.spec[f"{kind}Probe"], self._check, self._heard)

    async def _check(self, probe: Object) -> str:
        if self._leaving and probe is not self.spec.get("readinessProbe"):
            return ""  # who leaves is neither started late nor found dead
        return await probed(probe, self.spec, self._sandbox.address, self.execute)

    def _heard(self, kind: str, good: bool, why: str) -> None:
        if why:
            self._told("Unhealthy", f"{kind.capitalize()} probe failed: {why}")
        if kind == "readiness" and self.state.ready != good:
            self.state.ready = good
            self._changed()

    async def execute(self, command: Sequence[str]) -> int:
        """Another command in it: a probe's, a hook's, or a test's."""
        assert self.process is not None, "it was never started"
        return await self.process.execute(command, self.log)

    # -- its end ---------------------------------------------------------------------------

    grace = 30.0
    """Seconds; the pod's, until it is deleted with another one."""

    async def stop(self, seconds: float, for_good: bool = True) -> None:
        """preStop, SIGTERM, and SIGKILL when the time is up that both have together."""
        self._leaving = self._leaving or for_good
        process = self.process
        if process is None or not process.alive:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._pre_stop()
                process.signal(signal.SIGTERM)
                await process.wait()
        except TimeoutError:
            self._told("Killing", f"Container {self.spec['name']} exceeded its grace period")
            await self.kill()

    async def _pre_stop(self) -> None:
        hook = (self.spec.get("lifecycle") or {}).get("preStop")
        if not hook:
            return
        if "exec" in hook:
            code = await self.execute(hook["exec"]["command"])
            if code:
                self._told("FailedPreStopHook", f"PreStopHook failed: exit code {code}")
        elif "httpGet" in hook:
            port_of(self.spec, hook["httpGet"]["port"])
            told = await probed({**hook, "timeoutSeconds": 30}, self.spec,
                                self._sandbox.address, self.execute)  # fmt: skip
            if told:
                self._told("FailedPreStopHook", f"PreStopHook failed: {told}")
        elif "sleep" in hook:
            await asyncio.sleep(hook["sleep"]["seconds"])

    async def kill(self) -> None:
        self._leaving = True
        if self.process is not None:
            self.process.signal(signal.SIGKILL)
            async with asyncio.timeout(REAP_SECONDS):
                await self.process.wait()
