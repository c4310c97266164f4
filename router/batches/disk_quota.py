"""Reserves disk space for uploaded files before their data is written. All routers that share the
folder respect the reservations."""

import os
from pathlib import Path

from baton.core.ids import TenantId
from router.batches.batch_store import BatchStore
from router.batches.file_limits import FileLimits
from router.batches.json_files import size_bytes
from router.errors import ApiError


class DiskQuota:
    """Reserves space for an upload by extending its file, which stays sparse until data is written.
    All routers thus see the reservation in the file's size. The reservation ends when the file is
    deleted or truncated."""

    def __init__(self, store: BatchStore, folder_bytes: int) -> None:
        self._store = store
        self._folder_bytes = folder_bytes

    def reserve(
        self, tenant: TenantId, path: Path, limits: FileLimits, least: int, wanted: int
    ) -> int:
        """Resize the existing file at ``path`` to ``wanted`` bytes, or to fewer if the limits allow
        no more, and return its new size. Raises ApiError (413) if the limits allow less than
        ``least`` bytes, or if the tenant has too many files."""
        with self._store.lock():
            if self._store.num_files(tenant) > limits.files:
                message = f"there are already {limits.files} files, the maximum; delete some"
                raise ApiError(413, message, code="too_many_files")
            own_bytes = size_bytes(path)
            tenant_room = limits.file_bytes - (self._store.used_bytes(tenant) - own_bytes)
            folder_room = self._folder_bytes - (self._store.used_bytes() - own_bytes)
            room = min(tenant_room, folder_room)
            if room < max(least, 1):
                raise _no_space_error(max(room, 0), limits, is_own=tenant_room <= folder_room)
            granted = min(wanted, room)
            os.truncate(path, granted)
            return granted


def _no_space_error(room: int, limits: FileLimits, *, is_own: bool) -> ApiError:
    if is_own:
        message = (
            f"a tenant's files may have {limits.file_bytes} bytes in total, of which {room} are "
            "free; delete some files"
        )
    else:
        message = f"only {room} bytes are free, but the file is larger; delete some files"
    return ApiError(413, message, param="file", code="no_space")
