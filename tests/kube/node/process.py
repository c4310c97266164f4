"""One container's process: started in its sandbox, entered, signalled, waited for."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.kube.node.sandbox import DIE_WITH_US, Sandbox, child_of

LOOK_SECONDS = 0.005
INSIDE = ("mount", "net", "uts", "ipc", "pid", "root", "wd")


class ContainerProcess:
    """It is process 1 of a namespace of its own, so all that it has started ends with it; and it
    ends with the process that started it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        environment: Mapping[str, str],
        identity: Sequence[str],
    ) -> None:
        self._process = process
        self._environment = dict(environment)
        self._identity = list(identity)

    @staticmethod
    async def start(
        sandbox: Sandbox,
        script: str,
        environment: Mapping[str, str],
        identity: Sequence[str],
        log: Path,
    ) -> "ContainerProcess":
        """``script`` as :func:`root.script` makes it."""
        isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script]
        with log.open("ab") as written:
            process = await asyncio.create_subprocess_exec(
                *DIE_WITH_US, *sandbox.entered(), *isolated,
                env=dict(environment), stdin=asyncio.subprocess.DEVNULL,
                stdout=written, stderr=written,
            )  # fmt: skip
        made = ContainerProcess(process, environment, identity)
        await made._begun()
        return made

    async def _begun(self) -> None:
        """Until it has its own file system: from then on it can be entered and signalled."""
        while self.alive:
            if _root_of(self.pid) != "/":
                return
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        """Of its process 1, as seen from here; 0 if it has ended or not begun."""
        return child_of(self._process.pid) if self.alive else 0

    async def wait(self) -> int:
        """Its exit code: 128 + n for the signal n."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    def signal(self, number: signal.Signals) -> None:
        pid = self.pid
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def entering(self, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """A command of this machine that runs ``command`` in here, and its environment."""
        inside = ["nsenter", f"--target={self.pid}", *(f"--{name}" for name in INSIDE)]
        return [*inside, *self._identity, *command], self._environment

    async def execute(self, command: Sequence[str], log: Path | None = None) -> int:
        """The exit code of another command in here; 137 when it was killed with the container.
        It is killed when this is cancelled."""
        if not self.pid:
            return 137
        words, environment = self.entering(command)
        written = log.open("ab") if log else None
        try:
            process = await asyncio.create_subprocess_exec(
                *DIE_WITH_US, *words, env=environment, stdin=asyncio.subprocess.DEVNULL,
                stdout=written or asyncio.subprocess.DEVNULL,
                stderr=written or asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            if written:
                written.close()
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return code if code >= 0 else 128 - code


def _root_of(pid: int) -> str:
    """Where a process has its files; "/" if it has gone or not begun."""
    try:
        return str(Path(f"/proc/{pid}/root").readlink()) if pid else "/"
    except OSError:
        return "/"
