"""Grammars from outside, tried in helper processes that can be killed."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Self, TypeVar

from baton.concurrency.fair_slots import FairSlots
from baton.core.grammar import Grammar
from baton.errors import Invalid, Unavailable
from baton.text.grammar.helper_process import (
    CPU_SECONDS,
    LENGTH_BYTES,
    MEMORY_BYTES,
    STACK_BYTES,
)
from baton.text.grammar.to_lark import to_lark

NUM_HELPERS = 2
"""Processes, made when they are needed; of one tenant one at a time."""

MAX_WAITING = 256
"""Grammars of 64 KiB each."""

WALL_SECONDS = 10.0
"""A helper that has not spent its processor time by then stands still, or the machine is full."""

MAX_PASSED = 4096
"""Grammars that are remembered, by their digests."""

MAX_JOBS = 1000
"""A helper that has tried so many makes room for a fresh one: its memory is in pieces."""

MAX_VERDICT_BYTES = 64 * 1024

REASONS = {
    signal.SIGPROF: f"takes more than {CPU_SECONDS:g} s of processor time to compile",
    signal.SIGABRT: f"takes more than {MEMORY_BYTES >> 20} MiB to compile",
    signal.SIGSEGV: f"is nested too deeply: it takes a stack of more than {STACK_BYTES >> 20} MiB",
    signal.SIGBUS: f"is nested too deeply: it takes a stack of more than {STACK_BYTES >> 20} MiB",
}
"""What a helper dies of is the grammar's own doing."""


Result = TypeVar("Result")


class GrammarChecker:
    """``arguments`` are the helper's: the path of a tokenizer.json, the size of the model's
    vocabulary, and its EOS tokens, with commas between them. Without any, grammars are read and
    not compiled. Single event loop at a time."""

    def __init__(self, arguments: Sequence[str] = (), num_helpers: int = NUM_HELPERS) -> None:
        self._arguments = tuple(arguments)
        self._slots = FairSlots(num_helpers, MAX_WAITING, "grammars")
        self._idle: list[GrammarHelperProcess] = []
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._threads = ThreadPoolExecutor(num_helpers, "grammar-check")

    @classmethod
    def of_model(cls, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Self:
        """A checker with the vocabulary of a model's directory."""
        eos = ",".join(map(str, sorted(eos_token_ids)))
        return cls([str(model_dir / "tokenizer.json"), str(vocab_size), eos])

    async def check(self, grammar: Grammar, owner: str) -> None:
        """Raises Invalid, saying what is wrong with it or what it takes too much of; Overloaded
        when too many wait; Unavailable when no helper answers. Cancelled, it ends the work. What
        has passed is remembered, of each owner by itself."""
        name = grammar.digest(owner)
        if name in self._passed:
            self._passed.move_to_end(name)
            return
        to_lark(grammar)
        async with self._slots.turn(owner):
            helper = await self._take()
            try:
                wrong = await self._in_thread(partial(helper.ask, grammar))
            except asyncio.CancelledError:
                helper.kill()
                raise
            finally:
                self._give(helper)
        if wrong:
            raise Invalid(wrong, param="response_format")
        self._passed[name] = None
        if len(self._passed) > MAX_PASSED:
            self._passed.popitem(last=False)

    def start(self) -> None:
        """Makes a helper before anybody waits for it."""
        self._idle.append(GrammarHelperProcess(self._arguments))

    def close(self) -> None:
        """Nothing may be checked any longer."""
        for helper in self._idle:
            helper.kill()
        self._idle.clear()
        self._threads.shutdown(wait=False)

    async def _take(self) -> "GrammarHelperProcess":
        while self._idle:
            helper = self._idle.pop()
            if helper.is_fit:
                return helper
        return await self._in_thread(partial(GrammarHelperProcess, self._arguments))

    def _give(self, helper: "GrammarHelperProcess") -> None:
        if helper.is_fit:
            self._idle.append(helper)
        else:
            helper.kill()

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


class GrammarHelperProcess:
    """One process, for one grammar at a time. It ends when nobody has it any longer."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "baton.text.grammar.helper_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._num_jobs = 0
        self._failed = False
        weakref.finalize(self, _end, self._process)

    @property
    def is_fit(self) -> bool:
        """Whether it can be asked again."""
        running = not self._failed and self._process.poll() is None
        return running and self._num_jobs < MAX_JOBS

    def kill(self) -> None:
        """From any thread: whoever asks it meanwhile sees it end. Idempotent."""
        self._failed = True
        self._process.kill()

    def ask(self, grammar: Grammar) -> str:
        """What is wrong with a grammar; empty for nothing. Blocks. Raises Unavailable."""
        self._num_jobs += 1
        try:
            return self._exchange(grammar)
        except (OSError, ValueError, TimeoutError) as error:
            self._failed = True
            return self._reason(grammar, error)

    def _exchange(self, grammar: Grammar) -> str:
        deadline = monotonic() + WALL_SECONDS
        job = json.dumps({"kind": grammar.kind.value, "text": grammar.text}).encode()
        self._write(len(job).to_bytes(LENGTH_BYTES, "big") + job)
        size = int.from_bytes(self._read(LENGTH_BYTES, deadline), "big")
        if size > MAX_VERDICT_BYTES:
            raise ValueError(f"a verdict of {size} bytes")
        return str(json.loads(self._read(size, deadline))["wrong"])

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) or 0 :]

    def _read(self, size: int, deadline: float) -> bytes:
        """Raises TimeoutError, or ConnectionResetError when the helper died."""
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(file, select.POLLIN)
        data = b""
        while len(data) < size:
            if not poll.poll(max(deadline - monotonic(), 0.0) * 1e3):
                raise TimeoutError("no verdict in time")
            new = os.read(file, size - len(data))
            if not new:
                raise ConnectionResetError("the helper ended")
            data += new
        return data

    def _reason(self, grammar: Grammar, error: Exception) -> str:
        """Why it gave no verdict. Raises Unavailable where that is not the grammar's doing."""
        if not isinstance(error, TimeoutError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        code = self._process.returncode
        if code is not None and -code in REASONS:
            return f"the {grammar.kind.value} {REASONS[signal.Signals(-code)]}"
        raise Unavailable(f"grammars can't be checked now: {error} (exit code {code})") from error


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The pipes are closed when no thread reads them any longer."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
