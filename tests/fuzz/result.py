"""The outcome of fuzzing, and the recorder that each fuzzer fills it with."""

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

MAX_EXAMPLES = 20
"""Kept of a run; the counts are of all."""

MAX_EXAMPLE_CHARACTERS = 2000

HANG_SECONDS = 5.0
"""A case that takes longer is a hang."""


@dataclass(frozen=True)
class FuzzResult:
    """Counts of cases, and of those that went wrong. ``examples`` say how to reproduce them: seed,
    number of the case, and the case itself."""

    cases: int
    crashes: int
    hangs: int
    server_errors: int
    examples: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        return not (self.crashes or self.hangs or self.server_errors)


class Recorder:
    """Counts the cases of one run of a fuzzer.

    Call ``begin`` before each case: it leaves the case in a file, so that one that ends the process
    can still be named by whoever started it.
    """

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._seed = seed
        self._case = ""
        self._file = case_file(name)
        self._result = FuzzResult(0, 0, 0, 0)

    def begin(self, case: str) -> None:
        """Starts the next case. ``case`` is whatever reproduces it beside the seed."""
        self._result = replace(self._result, cases=self._result.cases + 1)
        self._case = case
        self._file.write_text(self._described(""), errors="backslashreplace")

    def crash(self, detail: object) -> None:
        """Counts an exception that escaped, or a process that ended."""
        self._add("crash", detail, crashes=self._result.crashes + 1)

    def hang(self, detail: object) -> None:
        """Counts a case that took longer than ``HANG_SECONDS``."""
        self._add("hang", detail, hangs=self._result.hangs + 1)

    def server_error(self, detail: object) -> None:
        """Counts an answer that says the server itself is at fault (500, INTERNAL, UNKNOWN)."""
        self._add("server error", detail, server_errors=self._result.server_errors + 1)

    def result(self) -> FuzzResult:
        """Ends the run: the last case ended well, so its file goes."""
        self._file.unlink(missing_ok=True)
        return self._result

    def _add(self, what: str, detail: object, **counts: int) -> None:
        examples = self._result.examples
        if len(examples) < MAX_EXAMPLES:
            examples = (*examples, self._described(f"{what}: {detail}"))
        self._result = replace(self._result, examples=examples, **counts)

    def _described(self, what: str) -> str:
        told = f"{self._name} seed={self._seed} case={self._result.cases} {what}\n{self._case}"
        return told[:MAX_EXAMPLE_CHARACTERS]


def case_file(name: str) -> Path:
    """The file that holds the case under way of the fuzzer ``name`` in this process."""
    return Path(tempfile.gettempdir()) / f"baton-fuzz-{name}-{os.getpid()}.case"
