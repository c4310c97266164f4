"""Which lines of a batch were under way when a router died, and how often."""

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

MAX_ROUTER_DEATHS = 2
"""A line that was under way at so many deaths of a router is not tried again."""


class InflightJournal:
    """A journal on disk: ``+N`` before line N is asked, ``-N`` once that has ended, in whatever
    way. A line that began and never ended was under way when its router died. Records are short
    and appended whole, from whatever thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def deaths(self) -> Counter[int]:
        """How many routers died over each line. To be asked before any line begins: rewrites the
        journal to what counts. Raises OSError."""
        deaths = _read(self._path)
        new = self._path.with_suffix(".attempts-new")
        new.write_text("".join(f"+{number}\n" * count for number, count in deaths.items()))
        new.replace(self._path)
        return deaths

    def begin(self, number: int) -> None:
        """Raises OSError: a line that can't be told to have begun must not begin."""
        self._write(f"+{number}\n")

    def end(self, number: int) -> None:
        """Where it can't be written, the line counts as one that its router died of."""
        with suppress(OSError):
            self._write(f"-{number}\n")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, record: str) -> None:
        if self._file is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o600)
        os.write(self._file, record.encode())


def _read(path: Path) -> Counter[int]:
    deaths: Counter[int] = Counter()
    if not path.exists():
        return deaths
    for record in path.read_bytes().splitlines():
        sign, number = record[:1], record[1:]
        if sign in (b"+", b"-") and number.isdigit() and len(number) < 10:
            deaths[int(number)] += 1 if sign == b"+" else -1
    return +deaths
