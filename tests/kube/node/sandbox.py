"""What a pod's containers share: a network with an address, a host name, and memory between
processes."""

import asyncio
from pathlib import Path

from tests.kube.node.network import Network

SHARED = ("net", "uts", "ipc")
DIE_WITH_US = ["setpriv", "--pdeathsig=KILL"]


class Sandbox:
    """Kept by a process that does nothing; with it everything of the pod's network goes."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self._process = process
        self.address = address

    @property
    def pid(self) -> int:
        return self._process.pid

    @staticmethod
    async def start(network: Network, hostname: str) -> "Sandbox":
        begin = f"hostname {hostname[:63]}; echo ready; exec sleep infinity"
        process = await asyncio.create_subprocess_exec(
            *DIE_WITH_US, "unshare", "--net", "--uts", "--ipc", "sh", "-c", begin,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError("no namespaces for a pod")
        made = Sandbox(process, "")
        try:
            made.address = await asyncio.to_thread(network.attach, process.pid)
        except BaseException:
            await made.stop()
            raise
        return made

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    def entered(self) -> list[str]:
        """A command's beginning that runs it in here."""
        return ["nsenter", f"--target={self.pid}", *(f"--{name}" for name in SHARED)]


def child_of(pid: int) -> int:
    """The only child of a process; 0 if it has none."""
    try:
        told = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return 0
    return int(told[0]) if told else 0
