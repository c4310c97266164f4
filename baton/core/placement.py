"""Where a request goes."""

from dataclasses import dataclass

from baton.core.handoff import WorkerRef
from baton.core.store import StoreHint


@dataclass(frozen=True, slots=True)
class Placement:
    """Without ``prefill``, ``decode`` does the whole request."""

    prefill: WorkerRef | None
    decode: WorkerRef
    reason: str
    store_hint: StoreHint | None = None

    @property
    def workers(self) -> tuple[WorkerRef, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)
