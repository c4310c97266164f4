"""The files of one tenant, on disk."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from router.batches.json_files import make_folder, read_json, write_json
from router.errors import ApiError
from router.limits import MAX_EXTRA_RESERVED_BYTES, MAX_UPLOAD_SECONDS

_ID = re.compile(r"file-[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The record of a file. Times are seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None

    @property
    def json(self) -> dict[str, Any]:
        """Return the record in OpenAI's form."""
        return {**asdict(self), "object": "file", "status": "processed", "status_details": None}


Reserve = Callable[[Path, int, int], int]
"""Takes a file's path, the bytes that it needs at least, and the bytes that it should get if
possible. Reserves space, and returns the number of reserved bytes. Raises ApiError (413)."""


class FileUpload:
    """An upload in progress, which becomes visible with :meth:`FileStore.add`. Space is reserved
    for ``expected`` bytes at the start, and for further bytes before they are written."""

    def __init__(self, path: Path, max_bytes: int, expected: int, reserve: Reserve) -> None:
        """Create the file and reserve its space. If there is not enough space, raise ApiError (413)
        and leave nothing on disk."""
        self.path = path
        self.size_bytes = 0
        self._max_bytes = max_bytes
        self._reserve = reserve
        self._reserved = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o600), "wb")
        try:
            self._reserve_space(min(expected, max_bytes))
        except BaseException:
            self.discard()
            raise

    def write(self, data: bytes) -> None:
        """Append data. Raises ApiError (413) if the file gets too large, or if there is not enough
        space."""
        self.size_bytes += len(data)
        if self.size_bytes > self._max_bytes:
            message = f"the file is too large; it may have at most {self._max_bytes} bytes"
            raise ApiError(413, message, param="file", code="file_too_large")
        self._reserve_space(self.size_bytes)
        self._file.write(data)

    def close(self) -> None:
        """Close the file, and release the reserved space that was not written."""
        if not self._file.closed:
            self._file.truncate(self.size_bytes)
            self._file.close()

    def discard(self) -> None:
        try:
            self._file.close()
        finally:
            self.path.unlink(missing_ok=True)

    def _reserve_space(self, least: int) -> None:
        """Reserve at least ``least`` bytes. The reservation doubles each time, because checking the
        free space takes a while."""
        if least <= self._reserved and self._reserved:
            return
        num_ahead = min(2 * self._reserved, self._reserved + MAX_EXTRA_RESERVED_BYTES)
        num_ahead = min(num_ahead, self._max_bytes)
        self._reserved = self._reserve(self.path, least, max(least, num_ahead))


class FileStore:
    """Stores the files of one tenant. A file exists once its record is written. It may be deleted
    while it is being read. Files are moved while ``lock`` is held, so that whoever adds up their
    sizes under the lock misses none."""

    def __init__(self, folder: Path, lock: Callable[[], AbstractContextManager[None]]) -> None:
        self._folder = folder
        self._lock = lock

    def upload(self, name: str, max_bytes: int, expected: int, reserve: Reserve) -> FileUpload:
        """Begin an upload into the file ``{name}.part``; no other upload of the tenant may have the
        same ``name``. Raises ApiError (413) if there is not enough space."""
        path = make_folder(self._folder) / f"{name}.part"
        return FileUpload(path, max_bytes, expected, reserve)

    def add(self, record: StoredFile, data: Path) -> None:
        """Move the file at ``data`` into the store and save its record. Idempotent: the file may
        already have been moved. Takes the lock."""
        make_folder(self._folder)
        with self._lock():
            if data.exists():
                data.replace(self.data_path(record.id))
            write_json(self._folder / f"{record.id}.json", asdict(record))

    def list_files(self) -> Sequence[StoredFile]:
        """Return the records of all files, oldest first."""
        records = [self._read(path) for path in self._folder.glob("file-*.json")]
        found = [record for record in records if record is not None]
        return sorted(found, key=lambda record: (record.created_at, record.id))

    def get(self, file_id: str) -> StoredFile:
        """Return a file's record. Raises ApiError (404) if there is no such file."""
        found = _ID.fullmatch(file_id) and self._read(self._folder / f"{file_id}.json")
        if not found:
            raise _file_not_found(file_id)
        return found

    def data_path(self, file_id: str) -> Path:
        assert _ID.fullmatch(file_id), file_id
        return self._folder / f"{file_id}.data"

    def delete(self, file_id: str) -> None:
        """Delete a file. Raises ApiError (404) if there is no such file."""
        self.get(file_id)
        (self._folder / f"{file_id}.json").unlink(missing_ok=True)
        self.data_path(file_id).unlink(missing_ok=True)

    def open(self, file_id: str) -> tuple[StoredFile, BinaryIO]:
        """Open a file, which can be read to its end even if it is deleted meanwhile. Raises
        ApiError (404) if there is no such file."""
        record = self.get(file_id)
        try:
            return record, self.data_path(file_id).open("rb")
        except FileNotFoundError as error:
            raise _file_not_found(file_id) from error

    def delete_expired(self, now: float) -> None:
        """Delete expired files, and uploads that were abandoned when a router died."""
        for record in self.list_files():
            if record.expires_at is not None and record.expires_at <= now:
                self.delete(record.id)
        for part in self._folder.glob("*.part"):
            if part.stat().st_mtime < now - MAX_UPLOAD_SECONDS:
                part.unlink(missing_ok=True)

    def _read(self, path: Path) -> StoredFile | None:
        try:
            return StoredFile(**(read_json(path) or {}))
        except TypeError:
            return None  # written by another version of the router


def _file_not_found(file_id: str) -> ApiError:
    return ApiError(404, f"No such File object: {file_id}", param="id", code="not_found")
