"""The namespaces that the containers of a pod share: network, host name and IPC."""

import asyncio
from pathlib import Path

from tests.kube.node.network import Network

SHARED = ("net", "uts", "ipc")
DIE_WITH_US = ["setpriv", "--pdeathsig=KILL"]


class Sandbox:
    """A pod's namespaces. An idle process keeps them open, and they disappear when it exits."""

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
            raise RuntimeError("the Linux namespaces of a pod could not be created")
        sandbox = Sandbox(process, "")
        try:
            sandbox.address = await asyncio.to_thread(network.attach, process.pid)
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    def exec_prefix(self) -> list[str]:
        """Return the command prefix that runs a command in these namespaces."""
        return ["nsenter", f"--target={self.pid}", *(f"--{name}" for name in SHARED)]


def child_of(pid: int) -> int:
    """Return the process id of the only child of a process; 0 if it has none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return 0
    return int(children[0]) if children else 0
