"""The log of one process of a local cluster, which is limited in size."""

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TextIO

import structlog

from baton.clock import Clock
from baton.obs.lost_writes import LOST_WRITES

MAX_LOG_BYTES = 64 * 2**20
"""Once a log is larger, its text becomes the earlier part, and the one before that is removed. So a
process has at most twice this on the disk, and what it writes between two checks."""

CHECK_SECONDS = 10.0
"""How often the size of a log is checked."""

TAIL_BYTES = 64 * 1024
"""The last line of a log is searched for among so many bytes at its end."""

COPY_BYTES = 2**20

log = structlog.get_logger(__name__)


class ProcessLog:
    """The log at ``path``, and its earlier part beside it. The process keeps its file open, so the
    text is copied and the file is truncated; lines that are written just in between are lost."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.path = path
        self._earlier = path.with_name(f"{path.name}.1")
        self._max_bytes = max_bytes

    def open(self) -> BinaryIO:
        """Open the log for a process that writes it. It is opened for appending, so that the
        process goes on at the beginning of a truncated file. If the log can't be opened, return a
        file that discards everything."""
        try:
            file = self.path.open("ab")
        except OSError as error:
            LOST_WRITES.record_loss(self.path.name)
            log.error("log_not_opened", log=str(self.path), error=str(error))
            return Path(os.devnull).open("ab")
        LOST_WRITES.record_success(self.path.name)
        return file

    def limit(self) -> bool:
        """Move the text to the earlier part if there is too much of it, and return whether it was.
        If the disk is full, the text is dropped."""
        try:
            if self.path.stat().st_size <= self._max_bytes:
                return False
        except OSError:  # the process has not begun to write
            return False
        copy = self._earlier.with_name(f"{self._earlier.name}.part")
        try:
            self._copy_to(copy)
            copy.replace(self._earlier)
            os.truncate(self.path, 0)
        except OSError as error:
            with suppress(OSError):
                copy.unlink(missing_ok=True)
                os.truncate(self.path, 0)
            log.warning("log_dropped", log=str(self.path), error=str(error))
        return True

    def _copy_to(self, copy: Path) -> None:
        """Copy the text. However fast the process writes meanwhile, the copy does not become longer
        than twice the limit."""
        with self.path.open("rb") as source, copy.open("wb") as target:
            while target.tell() < 2 * self._max_bytes:
                chunk = source.read(COPY_BYTES)
                if not chunk:
                    break
                target.write(chunk)

    async def keep_limited(self, clock: Clock) -> None:
        """Limit the log from time to time, until cancelled."""
        while True:
            await clock.sleep(CHECK_SECONDS)
            await asyncio.to_thread(self.limit)

    def write_to(self, output: TextIO) -> None:
        """Write the earlier part and the log to ``output``. Raises FileNotFoundError."""
        if self._earlier.is_file():
            with self._earlier.open(errors="replace") as text:
                shutil.copyfileobj(text, output)
        with self.path.open(errors="replace") as text:
            shutil.copyfileobj(text, output)

    def last_line(self) -> str:
        """Return the last line, or a text with the log's path if it is empty."""
        for path in (self.path, self._earlier):
            lines = _tail(path).decode(errors="replace").strip().splitlines()
            if lines:
                return lines[-1].removeprefix("baton: ")
        return f"it logged nothing; see {self.path}"


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
            return file.read(TAIL_BYTES)
    except OSError:
        return b""
