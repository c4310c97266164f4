"""The result of a fuzzer, and the recorder that collects it."""

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

MAX_EXAMPLES = 20
"""The maximum number of examples to keep; the counts include all cases."""

MAX_EXAMPLE_CHARACTERS = 2000

HANG_SECONDS = 5.0
"""The time after which a case counts as a hang."""


@dataclass(frozen=True)
class FuzzResult:
    """The number of cases, and the numbers of crashes, hangs and server errors among them. Each of
    ``examples`` describes how to reproduce one of these: the seed, the number of the case, and the
    case itself."""

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

    Call ``begin`` before each case. It writes the case to a file, so that the parent process can
    report a case that kills this process.
    """

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._seed = seed
        self._case = ""
        self._file = case_file(name)
        self._result = FuzzResult(0, 0, 0, 0)

    def begin(self, case: str) -> None:
        """Start the next case. ``case`` describes it, so that it can be reproduced without running
        the earlier cases."""
        self._result = replace(self._result, cases=self._result.cases + 1)
        self._case = case
        self._file.write_text(self._described(""), errors="backslashreplace")

    def crash(self, detail: object) -> None:
        """Count an exception or another result that must not occur."""
        self._add("crash", detail, crashes=self._result.crashes + 1)

    def hang(self, detail: object) -> None:
        """Count a case that took longer than ``HANG_SECONDS``."""
        self._add("hang", detail, hangs=self._result.hangs + 1)

    def server_error(self, detail: object) -> None:
        """Count a response that reports a server error (500, INTERNAL, UNKNOWN)."""
        self._add("server error", detail, server_errors=self._result.server_errors + 1)

    def result(self) -> FuzzResult:
        """End the run and return its result. Removes the case file, since the last case did not
        kill the process."""
        self._file.unlink(missing_ok=True)
        return self._result

    def _add(self, what: str, detail: object, **counts: int) -> None:
        examples = self._result.examples
        if len(examples) < MAX_EXAMPLES:
            examples = (*examples, self._described(f"{what}: {detail}"))
        self._result = replace(self._result, examples=examples, **counts)

    def _described(self, what: str) -> str:
        text = f"{self._name} seed={self._seed} case={self._result.cases} {what}\n{self._case}"
        return text[:MAX_EXAMPLE_CHARACTERS]


def case_file(name: str) -> Path:
    """Return the path of the file in which the fuzzer ``name`` keeps its current case."""
    return Path(tempfile.gettempdir()) / f"baton-fuzz-{name}-{os.getpid()}.case"
