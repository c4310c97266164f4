"""Checks clients' grammars by compiling them in helper processes, which can be killed."""

import asyncio
import json
import os
import select
import signal
import subprocess
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Self, TypeVar

from baton.concurrency.budget import Budget
from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid, Unavailable
from baton.system.memory_watch import MemoryWatch
from baton.system.portability import uses_linux
from baton.system.process_environment import helper_environment
from baton.system.python_process import python_command
from baton.text.grammar.helper_process import (
    CPU_SECONDS,
    LENGTH_BYTES,
    MEMORY_BYTES,
    STACK_BYTES,
)
from baton.text.grammar.limits import (
    MAX_GRAMMARS_PER_HELPER,
    MAX_REMEMBERED_GRAMMARS,
    MAX_VERDICT_BYTES,
    MAX_WAITING_CHECKS,
)
from baton.text.grammar.to_lark import to_lark
from baton.text.grammar.token_rules import TokenRules

NUM_HELPERS = 2
"""Number of helper processes, started when needed. A tenant uses one at a time."""

VERDICT_TIMEOUT_SECONDS = 10.0
"""Time limit for a helper's verdict. A helper that has not used up its CPU time by then hangs, or
the machine is overloaded."""

WATCH_SECONDS = 0.02
"""Interval between looks at a helper's memory, where the system does not limit it."""

SIGNAL_REASONS = {
    signal.SIGPROF: f"takes more than {CPU_SECONDS:g} s of processor time to compile",
    signal.SIGABRT: f"takes more than {MEMORY_BYTES >> 20} MiB to compile",
    signal.SIGSEGV: f"is nested too deeply: it takes a stack of more than {STACK_BYTES >> 20} MiB",
    signal.SIGBUS: f"is nested too deeply: it takes a stack of more than {STACK_BYTES >> 20} MiB",
}
"""The signals that a grammar may cause in its helper, with the error that each reports to the
client."""


Result = TypeVar("Result")


class GrammarChecker:
    """Checks grammars in helper processes. ``arguments`` are a helper's command-line arguments: the
    path of a tokenizer.json, the size of the model's vocabulary, and its EOS tokens, separated by
    commas. Without arguments, grammars are parsed but not compiled. A checker must be used in only
    one event loop at a time."""

    def __init__(self, arguments: Sequence[str] = (), num_helpers: int = NUM_HELPERS) -> None:
        self._arguments = tuple(arguments)
        self._turns = Budget(num_helpers, "grammars", max_waiting=MAX_WAITING_CHECKS)
        self._idle: list[GrammarHelperProcess] = []
        self._valid_digests: OrderedDict[bytes, None] = OrderedDict()
        self._threads = ThreadPoolExecutor(num_helpers, "grammar-check")

    @classmethod
    def for_model(cls, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Self:
        """Return a checker with the vocabulary from a model's directory."""
        eos = ",".join(map(str, sorted(eos_token_ids)))
        return cls([str(model_dir / "tokenizer.json"), str(vocab_size), eos])

    async def check(self, grammar: Grammar, owner: str) -> None:
        """Check a grammar. Raises Invalid, saying what is wrong with the grammar or which resource
        it takes too much of; Overloaded when too many grammars wait; Unavailable when no helper
        answers. When this call is cancelled, its helper is killed. Valid grammars are remembered,
        separately for each owner."""
        if grammar.kind is GrammarKind.TOKEN_RULES:
            TokenRules.parse(grammar.text)  # takes no time that has to be limited
            return
        digest = grammar.digest(owner)
        if digest in self._valid_digests:
            self._valid_digests.move_to_end(digest)
            return
        to_lark(grammar)
        async with self._turns.turn(owner):
            helper = await self._acquire_helper()
            try:
                complaint = await self._in_thread(partial(helper.check, grammar))
            except asyncio.CancelledError:
                helper.kill()
                raise
            finally:
                self._return_helper(helper)
        if complaint:
            raise Invalid(complaint, param="response_format")
        self._valid_digests[digest] = None
        if len(self._valid_digests) > MAX_REMEMBERED_GRAMMARS:
            self._valid_digests.popitem(last=False)

    def start_helper(self) -> None:
        """Start a helper process now, so that the first check need not wait until one has
        started."""
        self._idle.append(GrammarHelperProcess(self._arguments))

    def close(self) -> None:
        """Kill the idle helpers. No grammar may be checked after that."""
        for helper in self._idle:
            helper.kill()
        self._idle.clear()
        self._threads.shutdown(wait=False)

    async def _acquire_helper(self) -> "GrammarHelperProcess":
        while self._idle:
            helper = self._idle.pop()
            if helper.is_usable:
                return helper
        return await self._in_thread(partial(GrammarHelperProcess, self._arguments))

    def _return_helper(self, helper: "GrammarHelperProcess") -> None:
        if helper.is_usable:
            self._idle.append(helper)
        else:
            helper.kill()

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


class GrammarHelperProcess:
    """A helper process, which checks one grammar at a time. The process is killed when this object
    is garbage-collected."""

    def __init__(self, arguments: Sequence[str]) -> None:
        limit = str(MEMORY_BYTES if uses_linux() else 0)
        self._process = subprocess.Popen(
            python_command("baton.text.grammar.helper_process", limit, *arguments),
            env=helper_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._num_jobs = 0
        self._failed = False
        weakref.finalize(self, _kill_and_close, self._process)

    @property
    def is_usable(self) -> bool:
        """Whether this process can check another grammar."""
        running = not self._failed and self._process.poll() is None
        return running and self._num_jobs < MAX_GRAMMARS_PER_HELPER

    def kill(self) -> None:
        """Kill the process; a concurrent :meth:`check` fails. Can be called from any thread.
        Idempotent."""
        self._failed = True
        self._process.kill()

    def check(self, grammar: Grammar) -> str:
        """Check a grammar and return what is wrong with it, or an empty string. Blocks. Raises
        Unavailable if the process gives no verdict and the grammar is not the cause."""
        self._num_jobs += 1
        try:
            return self._request_verdict(grammar)
        except (OSError, ValueError, TimeoutError) as error:
            self._failed = True
            return self._explain_failure(grammar, error)

    def _request_verdict(self, grammar: Grammar) -> str:
        deadline = monotonic() + VERDICT_TIMEOUT_SECONDS
        watch = None if uses_linux() else MemoryWatch(self._process.pid)
        job = json.dumps({"kind": grammar.kind.value, "text": grammar.text}).encode()
        self._write(len(job).to_bytes(LENGTH_BYTES, "big") + job)
        size = int.from_bytes(self._read(LENGTH_BYTES, deadline, watch), "big")
        if size > MAX_VERDICT_BYTES:
            raise ValueError(
                f"the helper process sent a verdict of {size} bytes; it may have at most "
                f"{MAX_VERDICT_BYTES}"
            )
        return str(json.loads(self._read(size, deadline, watch))["wrong"])

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) or 0 :]

    def _read(self, size: int, deadline: float, watch: MemoryWatch | None) -> bytes:
        """Read ``size`` bytes from the helper. Raises TimeoutError at the deadline, or
        ConnectionResetError if the helper died. If ``watch`` is given, the helper is killed when it
        has taken too much memory."""
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(file, select.POLLIN)
        data = b""
        while len(data) < size:
            left = max(deadline - monotonic(), 0.0)
            if not poll.poll((left if watch is None else min(left, WATCH_SECONDS)) * 1e3):
                if watch is not None and watch.has_grown_by(MEMORY_BYTES):
                    self._process.send_signal(signal.SIGABRT)
                if monotonic() >= deadline:
                    raise TimeoutError("the helper process gave no verdict in time")
                continue
            new = os.read(file, size - len(data))
            if not new:
                raise ConnectionResetError("the helper process exited")
            data += new
        return data

    def _explain_failure(self, grammar: Grammar, error: Exception) -> str:
        """Return why there was no verdict. Raises Unavailable if the grammar was not the cause."""
        if not isinstance(error, TimeoutError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        code = self._process.returncode
        if code is not None and -code in SIGNAL_REASONS:
            return f"the {grammar.kind.value} {SIGNAL_REASONS[signal.Signals(-code)]}"
        raise Unavailable(f"grammars can't be checked now: {error} (exit code {code})") from error


def _kill_and_close(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process, and close its pipes when no thread reads them any more."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
