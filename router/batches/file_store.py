"""The files of one tenant."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from router.batches.json_files import make_folder, read_json, write_json
from router.errors import ApiError

MAX_EXTRA_RESERVED_BYTES = 8 * 2**20
"""Reserved beyond what has come of an upload whose size was not told."""

MAX_UPLOAD_SECONDS = 24 * 3600.0
"""Nobody uploads for so long: what is older was left behind."""

_ID = re.compile(r"file-[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Times are seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None

    @property
    def json(self) -> dict[str, Any]:
        """As OpenAI's clients know it."""
        return {**asdict(self), "object": "file", "status": "processed", "status_details": None}


Reserve = Callable[[Path, int, int], int]
"""For a file that least, and so many wanted bytes: its size from now on. Raises Problem."""


class FileUpload:
    """A file on its way: nobody sees it before :meth:`FileStore.add`. Room is reserved for
    ``expected`` bytes at once, and for more before they are written."""

    def __init__(self, path: Path, max_bytes: int, expected: int, reserve: Reserve) -> None:
        """Raises Problem (413), and leaves nothing then."""
        self.path = path
        self.size_bytes = 0
        self._max_bytes = max_bytes
        self._reserve = reserve
        self._reserved = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o600), "wb")
        try:
            self._make_room(min(expected, max_bytes))
        except BaseException:
            self.discard()
            raise

    def write(self, data: bytes) -> None:
        """Raises Problem (413)."""
        self.size_bytes += len(data)
        if self.size_bytes > self._max_bytes:
            message = f"a file has at most {self._max_bytes} bytes, and this one is larger"
            raise ApiError(413, message, param="file", code="file_too_large")
        self._make_room(self.size_bytes)
        self._file.write(data)

    def close(self) -> None:
        """Gives back what was reserved and not written."""
        if not self._file.closed:
            self._file.truncate(self.size_bytes)
            self._file.close()

    def discard(self) -> None:
        try:
            self._file.close()
        finally:
            self.path.unlink(missing_ok=True)

    def _make_room(self, least: int) -> None:
        """Doubles it: to look how much there is takes a while."""
        if least <= self._reserved and self._reserved:
            return
        ahead = min(2 * self._reserved, self._reserved + MAX_EXTRA_RESERVED_BYTES, self._max_bytes)
        self._reserved = self._reserve(self.path, least, max(least, ahead))


class FileStore:
    """A file is there once its record is. Whoever reads one may be reading while it is deleted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def upload(self, name: str, max_bytes: int, expected: int, reserve: Reserve) -> FileUpload:
        """``name`` is nobody else's. Raises Problem (413)."""
        path = make_folder(self._folder) / f"{name}.part"
        return FileUpload(path, max_bytes, expected, reserve)

    def add(self, record: StoredFile, data: Path) -> None:
        """Takes the file at ``data``, which may have been added already: then this ends it."""
        make_folder(self._folder)
        if data.exists():
            data.replace(self.data(record.id))
        write_json(self._folder / f"{record.id}.json", asdict(record))

    def list(self) -> Sequence[StoredFile]:
        """Oldest first."""
        records = [self._read(path) for path in self._folder.glob("file-*.json")]
        there = [record for record in records if record is not None]
        return sorted(there, key=lambda record: (record.created_at, record.id))

    def get(self, file_id: str) -> StoredFile:
        """Raises Problem (404)."""
        found = _ID.fullmatch(file_id) and self._read(self._folder / f"{file_id}.json")
        if not found:
            raise _file_not_found(file_id)
        return found

    def data(self, file_id: str) -> Path:
        assert _ID.fullmatch(file_id), file_id
        return self._folder / f"{file_id}.data"

    def delete(self, file_id: str) -> None:
        """Raises Problem (404)."""
        self.get(file_id)
        (self._folder / f"{file_id}.json").unlink(missing_ok=True)
        self.data(file_id).unlink(missing_ok=True)

    def open(self, file_id: str) -> tuple[StoredFile, BinaryIO]:
        """To be read to its end, whoever deletes it meanwhile. Raises Problem (404)."""
        record = self.get(file_id)
        try:
            return record, self.data(file_id).open("rb")
        except FileNotFoundError as error:
            raise _file_not_found(file_id) from error

    def expire(self, now: float) -> None:
        """Deletes those whose time is over, and uploads that a router did not live to end."""
        for record in self.list():
            if record.expires_at is not None and record.expires_at <= now:
                self.delete(record.id)
        for part in self._folder.glob("*.part"):
            if part.stat().st_mtime < now - MAX_UPLOAD_SECONDS:
                part.unlink(missing_ok=True)

    def _read(self, path: Path) -> StoredFile | None:
        try:
            return StoredFile(**(read_json(path) or {}))
        except TypeError:
            return None  # another version wrote it


def _file_not_found(file_id: str) -> ApiError:
    return ApiError(404, f"No such File object: {file_id}", param="id", code="not_found")
