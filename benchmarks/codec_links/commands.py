"""Commands between the benchmark and the processes that it runs: lines of JSON."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TextIO

from baton.errors import Unavailable

MAX_LINE_BYTES = 2**22

_answers: TextIO = sys.stdout


class BenchProcess:
    """A process of the benchmark. Raises Unavailable if it has ended."""

    def __init__(self, module: str, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._module = module
        self._stdin, self._stdout = process.stdin, process.stdout

    def send(self, message: object) -> None:
        self.send_line(json.dumps(message).encode() + b"\n")

    def send_line(self, line: bytes) -> None:
        self._stdin.write(line)

    async def receive(self) -> Any:
        return json.loads(await self.receive_line())

    async def receive_line(self) -> bytes:
        line = await self._stdout.readline()
        if not line:
            raise Unavailable(f"the process {self._module} has ended; see its messages above")
        return line

    async def ask(self, message: object) -> Any:
        self.send(message)
        return await self.receive()


@asynccontextmanager
async def bench_process(
    module: str, *arguments: object, namespace: str = ""
) -> AsyncIterator[BenchProcess]:
    """Run the module ``benchmarks.codec_links.MODULE``, in a network namespace if one is given; end
    it afterwards."""
    prefix = ["ip", "netns", "exec", namespace] if namespace else []
    process = await asyncio.create_subprocess_exec(
        *prefix, sys.executable, "-m", f"benchmarks.codec_links.{module}", *map(str, arguments),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES,
    )  # fmt: skip
    try:
        yield BenchProcess(module, process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def keep_output_for_answers() -> None:
    """Send what this process prints otherwise, such as logs of libraries, to the standard error."""
    global _answers
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


async def next_command() -> Any:
    """Return the next command to this process, None after the last one."""
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    return json.loads(line) if line else None


def answer(message: object) -> None:
    print(json.dumps(message), file=_answers, flush=True)
