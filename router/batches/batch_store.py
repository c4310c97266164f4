"""All files and batches of a cluster, in one folder that its routers share."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from baton.core.ids import TenantId
from router.batches.batch import Batch, BatchStatus
from router.batches.file_store import FileStore
from router.batches.json_files import make_folder, read_json, size_bytes, write_json
from router.errors import ApiError

MAX_UNFINISHED_BATCHES = 100
"""Batches of one tenant."""

MAX_BATCHES = 1000
"""Records of one tenant: a list of them is read from disk in 50 ms. The oldest are forgotten."""

_ID = re.compile(r"batch_[0-9a-f]{1,64}")


class BatchStore:
    """``root/TENANT/files`` and ``root/TENANT/batches``, where TENANT is a digest: a name may be
    anything. A batch's record is written by whoever runs it, and by nobody else: who wants it
    cancelled leaves a note."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def shelf(self, tenant: TenantId) -> FileStore:
        return FileStore(self._home(tenant) / "files")

    def used_bytes(self, tenant: TenantId | None = None) -> int:
        """Of all files, or of one tenant's, those under way and what batches write among them."""
        home = "*" if tenant is None else self._home(tenant).name
        patterns = (f"{home}/files/*", f"{home}/batches/*.output", f"{home}/batches/*.error")
        return sum(size_bytes(path) for pattern in patterns for path in self.root.glob(pattern))

    def num_files(self, tenant: TenantId) -> int:
        """Those under way among them."""
        folder = self._home(tenant) / "files"
        return sum(1 for pattern in ("*.json", "*.part") for _ in folder.glob(pattern))

    def expire(self, now: float) -> None:
        """Deletes all files whose time is over."""
        for folder in self.root.glob("*/files"):
            FileStore(folder).expire(now)

    def create(self, batch: Batch) -> None:
        """Raises Problem (429) when the tenant has too many."""
        folder = make_folder(self._home(TenantId(batch.tenant)) / "batches")
        if len(list(folder.glob("*.open"))) >= MAX_UNFINISHED_BATCHES:
            message = (
                f"{MAX_UNFINISHED_BATCHES} batches are not finished yet, and that is the limit"
            )
            raise ApiError(429, message, code="rate_limit_exceeded")
        self._forget_oldest(folder)
        self.save(batch)

    def save(self, batch: Batch) -> None:
        open_note = self.part(batch, "open")
        write_json(self.part(batch, "json"), asdict(batch))
        if batch.is_over:
            open_note.unlink(missing_ok=True)
            self.part(batch, "cancel").unlink(missing_ok=True)
            self.part(batch, "attempts").unlink(missing_ok=True)
        else:
            open_note.touch()

    def get(self, tenant: TenantId, batch_id: str) -> Batch:
        """Raises Problem (404)."""
        path = self._home(tenant) / "batches" / f"{batch_id}.json"
        found = _read(path) if _ID.fullmatch(batch_id) else None
        if found is None:
            raise ApiError(404, f"No batch found with id {batch_id!r}", code="not_found")
        return self._as_seen(found)

    def batches(self, tenant: TenantId) -> Sequence[Batch]:
        """Newest first, as OpenAI lists them."""
        paths = (self._home(tenant) / "batches").glob("batch_*.json")
        found = [self._as_seen(batch) for path in paths if (batch := _read(path)) is not None]
        return sorted(found, key=lambda batch: (-batch.created_at, batch.id))

    def unfinished(self) -> Sequence[Batch]:
        """Of all tenants, oldest first."""
        notes = self.root.glob("*/batches/batch_*.open")
        found = [_read(note.with_suffix(".json")) for note in notes]
        there = [batch for batch in found if batch is not None and not batch.is_over]
        return sorted(there, key=lambda batch: (batch.created_at, batch.id))

    def cancel(self, batch: Batch) -> None:
        """Leaves the note."""
        self.part(batch, "cancel").touch()

    def is_cancelled(self, batch: Batch) -> bool:
        return self.part(batch, "cancel").exists()

    def part(self, batch: Batch, kind: str) -> Path:
        """``json``: its record; ``open``, ``cancel``: notes that it is unfinished, that it is to be
        cancelled; ``output``, ``error``: where its answers and its failures are collected;
        ``attempts``: the lines under way."""
        return self._home(TenantId(batch.tenant)) / "batches" / f"{batch.id}.{kind}"

    def _as_seen(self, batch: Batch) -> Batch:
        """Its runner may not have seen the note yet."""
        if batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS) and self.is_cancelled(
            batch
        ):
            batch.status = BatchStatus.CANCELLING
        return batch

    def _forget_oldest(self, folder: Path) -> None:
        """Of those that are finished, when there are too many."""
        paths = list(folder.glob("batch_*.json"))
        surplus = len(paths) - MAX_BATCHES + 1
        if surplus <= 0:
            return
        records = map(_read, paths)
        over = [record for record in records if record is not None and record.is_over]
        for record in sorted(over, key=lambda batch: batch.created_at)[:surplus]:
            self.part(record, "json").unlink(missing_ok=True)

    def _home(self, tenant: TenantId) -> Path:
        return self.root / hashlib.sha256(tenant.encode()).hexdigest()[:32]


def _read(path: Path) -> Batch | None:
    try:
        fields = read_json(path) or {}
        return Batch(**{**fields, "status": BatchStatus(fields["status"])})
    except (TypeError, ValueError, KeyError):
        return None  # another version wrote it
