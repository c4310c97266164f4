"""A batch: many requests of one tenant, one per line of a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

COMPLETION_WINDOW = "24h"
COMPLETION_WINDOW_SECONDS = 24 * 3600

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


class BatchStatus(StrEnum):
    """The status of a batch, with OpenAI's names. A ``validating`` batch is only queued: each line
    is validated when its request is about to run, so a batch is ``in_progress`` from its first line
    on."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


TRANSITIONS: Mapping[BatchStatus, frozenset[BatchStatus]] = {
    BatchStatus.VALIDATING: frozenset(
        {BatchStatus.IN_PROGRESS, BatchStatus.FAILED, BatchStatus.CANCELLING}
    ),
    BatchStatus.IN_PROGRESS: frozenset(
        {BatchStatus.FINALIZING, BatchStatus.CANCELLING, BatchStatus.FAILED}
    ),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED, BatchStatus.FAILED}),
    BatchStatus.FINALIZING: frozenset(
        {BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.FAILED}
    ),
}
"""Allowed transitions. An unfinished batch fails if its files can't be read or written."""

TERMINAL_STATUSES = frozenset(BatchStatus) - TRANSITIONS.keys()


@dataclass(slots=True)
class Batch:
    """A batch. ``times`` maps each status that the batch has had, except the first, to the time
    when it was set, in seconds since 1970."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_at: int
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    """How many seconds the output files are kept. If None, they are kept until they are deleted."""
    status: BatchStatus = BatchStatus.VALIDATING
    times: dict[str, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def is_finished(self) -> bool:
        return self.status in TERMINAL_STATUSES

    @property
    def expires_at(self) -> int:
        return self.created_at + COMPLETION_WINDOW_SECONDS

    @property
    def final_status(self) -> BatchStatus:
        """The status that the batch gets once all results are written."""
        if self.status is BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED
        return BatchStatus.EXPIRED if BatchStatus.EXPIRED in self.times else BatchStatus.COMPLETED

    def set_status(self, status: BatchStatus, now: float) -> None:
        assert status in TRANSITIONS.get(self.status, ()), f"{self.status} to {status}"
        self.status = status
        self.times[status] = int(now)

    @property
    def json(self) -> dict[str, Any]:
        """Return the batch in OpenAI's form."""
        states = [status for status in BatchStatus if status is not BatchStatus.VALIDATING]
        errors = {"object": "list", "data": self.errors} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": COMPLETION_WINDOW,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in states},
            "request_counts": {
                "total": self.total, "completed": self.completed, "failed": self.failed,
            },
            "metadata": self.metadata,
        }  # fmt: skip
