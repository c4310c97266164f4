"""Files on their way into the page cache, before whoever maps them gets there.

A page that is missing stops the thread that touches it, and asks the disk for little more: so it is
idle most of the time. Here it is asked for what comes next, all the time. Nothing is copied, and
the memory is the cache's, which the kernel takes back when it needs it.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

PIECE_BYTES = 128 * 1024
"""Of one request: Linux cuts off what is beyond a device's own readahead, of which this is the
usual one."""

AHEAD_BYTES = 2 * 2**30
"""At most of what is not used yet: what the fastest disks read in a second, of memory that others
may need as well."""


class Readahead:
    """Of ``files``, in order, ``ahead_bytes`` at most beyond what was used; there it waits for
    :meth:`advance`, or ends if it is not to wait. What it can't read is left to who needs it."""

    def __init__(
        self, files: Sequence[Path], ahead_bytes: int = AHEAD_BYTES, *, waits: bool = True
    ) -> None:
        self._files = files
        self._ahead_bytes = ahead_bytes
        self._waits = waits
        self._used_bytes = 0
        self._closed = False
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="readahead", daemon=True)

    def start(self) -> "Readahead":
        self._thread.start()
        return self

    def advance(self, used_bytes: int) -> None:
        """So many bytes of the files are used."""
        with self._moved:
            self._used_bytes = used_bytes
            self._moved.notify()

    def close(self) -> None:
        """Asks for nothing more."""
        with self._moved:
            self._closed = True
            self._moved.notify()
        self.join()

    def join(self) -> None:
        """Until all that it may ask for is asked for."""
        self._thread.join()

    def _run(self) -> None:
        asked_bytes = 0
        try:
            for file in self._files:
                with file.open("rb") as opened:
                    for start, length in _pieces(os.fstat(opened.fileno()).st_size):
                        asked_bytes += length
                        if not self._may_ask(asked_bytes):
                            return
                        os.posix_fadvise(opened.fileno(), start, length, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            import structlog  # the check of a GPU does without it

            log = structlog.get_logger(__name__)
            log.warning("readahead_failed", error=str(error))

    def _may_ask(self, asked_bytes: int) -> bool:
        """Once there is room; False: nobody wants any more."""

        def has_room() -> bool:
            return asked_bytes - self._used_bytes <= self._ahead_bytes

        with self._moved:
            if self._waits:
                self._moved.wait_for(lambda: self._closed or has_room())
            return has_room() and not self._closed


def _pieces(size_bytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size_bytes, PIECE_BYTES):
        yield start, min(PIECE_BYTES, size_bytes - start)
