"""Room in the folder of files, reserved before anything is written, among all routers that share
the folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.core.ids import TenantId
from router.batches.batch_store import BatchStore
from router.batches.file_limits import FileLimits
from router.batches.json_files import make_folder, size_bytes
from router.errors import ApiError


class DiskQuota:
    """A reservation is the size of the file itself, which is a hole as far as nothing was written:
    it is seen by every router, and gone with the file, whatever ends it."""

    def __init__(self, library: BatchStore, folder_bytes: int) -> None:
        self._library = library
        self._folder_bytes = folder_bytes

    def reserve(
        self, tenant: TenantId, path: Path, limits: FileLimits, least: int, wanted: int
    ) -> int:
        """For the file at ``path``, which exists: its size from now on, ``wanted`` bytes, or what
        there is room for. Raises Problem (413) when there is less than ``least``, or the tenant has
        too many files with it."""
        with self.locked():
            if self._library.num_files(tenant) > limits.files:
                message = f"there are {limits.files} files, and that is the limit: delete some"
                raise ApiError(413, message, code="too_many_files")
            own = size_bytes(path)
            of_tenant = limits.file_bytes - (self._library.used_bytes(tenant) - own)
            of_all = self._folder_bytes - (self._library.used_bytes() - own)
            room = min(of_tenant, of_all)
            if room < max(least, 1):
                raise _no_space_error(max(room, 0), limits, is_own=of_tenant <= of_all)
            granted = min(wanted, room)
            os.truncate(path, granted)
            return granted

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among all routers and threads. Raises OSError."""
        path = make_folder(self._library.root) / "space.lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _no_space_error(room: int, limits: FileLimits, *, is_own: bool) -> ApiError:
    if is_own:
        message = (
            f"the files of a tenant have at most {limits.file_bytes} bytes together, and there is "
            f"room for {room}: delete some"
        )
    else:
        message = f"there is room for {room} bytes, and the file is larger: delete some files"
    return ApiError(413, message, param="file", code="no_space")
