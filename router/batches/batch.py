"""A batch: many requests of one tenant, one a line of a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

WINDOW = "24h"
WINDOW_SECONDS = 24 * 3600

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")


class Status(StrEnum):
    """OpenAI's, but for ``validating``: lines are looked at when they are answered, so a batch is
    in progress from its first line on."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


TRANSITIONS: Mapping[Status, frozenset[Status]] = {
    Status.VALIDATING: frozenset({Status.IN_PROGRESS, Status.FAILED, Status.CANCELLING}),
    Status.IN_PROGRESS: frozenset({Status.FINALIZING, Status.CANCELLING, Status.FAILED}),
    Status.CANCELLING: frozenset({Status.CANCELLED, Status.FAILED}),
    Status.FINALIZING: frozenset({Status.COMPLETED, Status.EXPIRED, Status.FAILED}),
}
"""A batch that has begun fails where its files can't be read or written."""

TERMINAL = frozenset(Status) - TRANSITIONS.keys()


@dataclass(slots=True)
class Batch:
    """Times are seconds since 1970, under the names of the states that began then."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_at: int
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    """How long its output is kept; None: until it is deleted."""
    status: Status = Status.VALIDATING
    times: dict[str, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def is_over(self) -> bool:
        return self.status in TERMINAL

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOW_SECONDS

    @property
    def ending(self) -> Status:
        """What it becomes once everything is written."""
        if self.status is Status.CANCELLING:
            return Status.CANCELLED
        return Status.EXPIRED if Status.EXPIRED in self.times else Status.COMPLETED

    def become(self, status: Status, now: float) -> None:
        assert status in TRANSITIONS.get(self.status, ()), f"{self.status} to {status}"
        self.status = status
        self.times[status] = int(now)

    @property
    def json(self) -> dict[str, Any]:
        """As OpenAI's clients know it."""
        states = [status for status in Status if status is not Status.VALIDATING]
        errors = {"object": "list", "data": self.errors} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": WINDOW,
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
