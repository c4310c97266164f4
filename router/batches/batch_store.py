"""The store of all files and batches of a cluster, in one folder that its routers share."""

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from baton.core.ids import TenantId
from router.batches.batch import Batch, BatchStatus
from router.batches.file_store import FileStore
from router.batches.json_files import make_folder, read_json, size_bytes, write_json
from router.errors import ApiError
from router.limits import MAX_BATCHES, MAX_UNFINISHED_BATCHES

_ID = re.compile(r"batch_[0-9a-f]{1,64}")


class BatchStore:
    """Stores files in ``root/TENANT/files`` and batches in ``root/TENANT/batches``, where TENANT is
    a digest, since a tenant's name may contain anything. Once a batch is created, only the router
    that runs it writes its record; to cancel the batch, another router writes a marker file."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def file_store(self, tenant: TenantId) -> FileStore:
        return FileStore(self._tenant_folder(tenant) / "files", self.lock)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder's lock for the duration of a ``with`` block; all routers and threads that
        reserve space, move files or create batches wait for it. It can't be held twice. Raises
        OSError."""
        path = make_folder(self.root) / "space.lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def used_bytes(self, tenant: TenantId | None = None) -> int:
        """Return the total size of the files of all tenants, or of one tenant if ``tenant`` is
        given. This includes uploads and batch output in progress. Without the lock, a file that is
        moved meanwhile may be missed."""
        home = "*" if tenant is None else self._tenant_folder(tenant).name
        patterns = (f"{home}/files/*", f"{home}/batches/*.output", f"{home}/batches/*.error")
        return sum(size_bytes(path) for pattern in patterns for path in self.root.glob(pattern))

    def num_files(self, tenant: TenantId) -> int:
        """Return the number of a tenant's files, including uploads in progress."""
        folder = self._tenant_folder(tenant) / "files"
        return sum(1 for pattern in ("*.json", "*.part") for _ in folder.glob(pattern))

    def delete_expired(self, now: float) -> None:
        """Delete all expired files."""
        for folder in self.root.glob("*/files"):
            FileStore(folder, self.lock).delete_expired(now)

    def create(self, batch: Batch) -> None:
        """Save a new batch. Raises ApiError (429) if the tenant has too many unfinished batches."""
        folder = make_folder(self._tenant_folder(TenantId(batch.tenant)) / "batches")
        if len(list(folder.glob("*.open"))) >= MAX_UNFINISHED_BATCHES:
            message = f"there are already {MAX_UNFINISHED_BATCHES} unfinished batches, the maximum"
            raise ApiError(429, message, code="rate_limit_exceeded")
        self._forget_oldest(folder)
        self.save(batch)

    def save(self, batch: Batch) -> None:
        open_note = self.path(batch, "open")
        write_json(self.path(batch, "json"), asdict(batch))
        if batch.is_finished:
            open_note.unlink(missing_ok=True)
            self.path(batch, "cancel").unlink(missing_ok=True)
            self.path(batch, "attempts").unlink(missing_ok=True)
        else:
            open_note.touch()

    def get(self, tenant: TenantId, batch_id: str) -> Batch:
        """Return a tenant's batch. Raises ApiError (404) if there is no such batch."""
        path = self._tenant_folder(tenant) / "batches" / f"{batch_id}.json"
        found = _read(path) if _ID.fullmatch(batch_id) else None
        if found is None:
            raise ApiError(404, f"No batch found with id {batch_id!r}", code="not_found")
        return self._with_cancellation(found)

    def list_batches(self, tenant: TenantId) -> Sequence[Batch]:
        """Return a tenant's batches, newest first, as OpenAI lists them."""
        paths = (self._tenant_folder(tenant) / "batches").glob("batch_*.json")
        found = [
            self._with_cancellation(batch) for path in paths if (batch := _read(path)) is not None
        ]
        return sorted(found, key=lambda batch: (-batch.created_at, batch.id))

    def list_unfinished(self) -> Sequence[Batch]:
        """Return the unfinished batches of all tenants, oldest first."""
        notes = self.root.glob("*/batches/batch_*.open")
        found = [_read(note.with_suffix(".json")) for note in notes]
        batches = [batch for batch in found if batch is not None and not batch.is_finished]
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id))

    def cancel(self, batch: Batch) -> None:
        """Mark the batch for cancellation by the router that runs it."""
        self.path(batch, "cancel").touch()

    def is_cancelled(self, batch: Batch) -> bool:
        return self.path(batch, "cancel").exists()

    def path(self, batch: Batch, kind: str) -> Path:
        """Return the path of the batch's file of a ``kind``: ``json`` is its record; ``open`` marks
        it as unfinished, and ``cancel`` marks it for cancellation; ``output`` and ``error`` hold
        its results so far; ``attempts`` is the journal of requests in flight."""
        return self._tenant_folder(TenantId(batch.tenant)) / "batches" / f"{batch.id}.{kind}"

    def _with_cancellation(self, batch: Batch) -> Batch:
        """Return the batch. If it is marked for cancellation, its status is ``cancelling``, even if
        the router that runs it has not seen the marker yet."""
        if batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS) and self.is_cancelled(
            batch
        ):
            batch.status = BatchStatus.CANCELLING
        return batch

    def _forget_oldest(self, folder: Path) -> None:
        """Delete the records of the oldest finished batches if there are too many."""
        paths = list(folder.glob("batch_*.json"))
        surplus = len(paths) - MAX_BATCHES + 1
        if surplus <= 0:
            return
        records = map(_read, paths)
        finished = [record for record in records if record is not None and record.is_finished]
        for record in sorted(finished, key=lambda batch: batch.created_at)[:surplus]:
            self.path(record, "json").unlink(missing_ok=True)

    def _tenant_folder(self, tenant: TenantId) -> Path:
        return self.root / hashlib.sha256(tenant.encode()).hexdigest()[:32]


def _read(path: Path) -> Batch | None:
    try:
        fields = read_json(path) or {}
        return Batch(**{**fields, "status": BatchStatus(fields["status"])})
    except (TypeError, ValueError, KeyError):
        return None  # written by another version of the router
