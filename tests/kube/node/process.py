"""A container's main process."""

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
    """A container's main process. It is process 1 in its own PID namespace, so the kernel kills all
    its children when it exits. It is killed when the process that started it exits."""

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
        """Start a process in the sandbox. ``script`` comes from :func:`root.script`."""
        isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script]
        with log.open("ab") as written:
            process = await asyncio.create_subprocess_exec(
                *DIE_WITH_US, *sandbox.exec_prefix(), *isolated,
                env=dict(environment), stdin=asyncio.subprocess.DEVNULL,
                stdout=written, stderr=written,
            )  # fmt: skip
        started = ContainerProcess(process, environment, identity)
        await started._wait_until_isolated()
        return started

    async def _wait_until_isolated(self) -> None:
        """Wait until the process has its own root folder. Before that, no other command can enter
        its namespaces, and no signal can be sent to it."""
        while self.alive:
            if _root_of(self.pid) != "/":
                return
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        """The process id on this machine, or 0 if the process has not started or has exited."""
        return child_of(self._process.pid) if self.alive else 0

    async def wait(self) -> int:
        """Wait for the process to exit; return its exit code, which is 128 + n after signal n."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    def signal(self, number: signal.Signals) -> None:
        pid = self.pid
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def exec_command(self, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return a command line for this machine that runs ``command`` in the container, and its
        environment."""
        inside = ["nsenter", f"--target={self.pid}", *(f"--{name}" for name in INSIDE)]
        return [*inside, *self._identity, *command], self._environment

    async def execute(self, command: Sequence[str], log: Path | None = None) -> int:
        """Run another command in the container; return its exit code, or 137 if it was killed with
        the container. Cancelling this call kills the command."""
        if not self.pid:
            return 137
        words, environment = self.exec_command(command)
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
    """Return a process's root folder, or "/" if the process has not started or has exited."""
    try:
        return str(Path(f"/proc/{pid}/root").readlink()) if pid else "/"
    except OSError:
        return "/"
