"""A journal of a batch's requests in flight, which shows which requests were running when a router
died."""

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path


class InflightJournal:
    """A journal on disk. The record ``+N`` is written before request N runs, and ``-N`` once the
    request has ended in any way. A request that began and never ended was in flight when its router
    died. Each record is appended in one short write, so all threads may write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def read_deaths(self) -> Counter[int]:
        """Return, for each request number, how many routers died while that request was in flight,
        and compact the journal. Call this before any request begins. Raises OSError."""
        deaths = _read(self._path)
        new = self._path.with_suffix(".attempts-new")
        new.write_text("".join(f"+{number}\n" * count for number, count in deaths.items()))
        new.replace(self._path)
        return deaths

    def begin(self, number: int) -> None:
        """Record that a request begins. Raises OSError if that can't be written; the request must
        not begin then."""
        self._write(f"+{number}\n")

    def end(self, number: int) -> None:
        """Record that a request has ended. If that can't be written, the next router that opens the
        batch assumes that the request was in flight when a router died."""
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
