"""The interfaces of a worker's two sides: the prefill side computes prompts, and the decode side
generates answers.

:class:`Worker` composes them; neither side knows the other. Every worker has both sides, whatever
role it announces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.core.ids import TokenId
from baton.core.kv_transfer import KvTransferOpen, WorkerRef
from baton.core.request import RequestSpec
from baton.engine.constraint import Constraint
from baton.engine.result import MigratedSequence, PrefillProgress, StepResult
from baton.rpc.worker_service import KvExportStream
from baton.worker.job import Job


class KvExports(Protocol):
    """The exports of requests whose KV another worker imports, because that worker will generate or
    continue their answers."""

    def open(self, job: Job, num_tokens: int, on_close: Callable[[bool], None]) -> None:
        """Open an export of the KV of ``num_tokens`` tokens. ``on_close(complete)`` is called once:
        when the importing worker has read everything or has disconnected, or in :meth:`close`.
        ``complete`` says whether that worker has read everything."""
        ...

    def close(self, job: Job) -> None:
        """End the job's export, if it has one."""
        ...

    def record_progress(self, progress: PrefillProgress) -> None:
        """Announce the blocks that a step completed to the worker that imports the request's KV.
        Does nothing for a request that has no export."""
        ...

    def finish_prefill(self, job: Job, token_id: TokenId, finished: bool) -> None:
        """Record that all of the request's KV is computed. ``token_id`` is the token that was
        sampled after it: the answer's first, or its next if the request was resumed. If
        ``finished``, that token ended the answer, so no decode worker needs the KV: the export
        closes at once or, if a worker is already importing the KV, when that worker
        disconnects."""
        ...

    def unread_jobs(self) -> list[Job]:
        """Return the prefilled jobs whose KV no worker has started to import in time."""
        ...

    async def attach_reader(self, opening: KvTransferOpen) -> KvExportStream:
        """Wait until the export is open, and attach a reader to it. Raises NotFound if the export
        is not opened in time, Invalid if the reader's KV is incompatible, and Unavailable if the
        export already has a reader."""
        ...


class PrefillSide(Protocol):
    """Computes prompts. Implemented by :class:`prefill_worker.handler.PrefillHandler`."""

    @property
    def exports(self) -> KvExports: ...

    async def start_prefill(self, job: Job, constraint: Constraint | None) -> None:
        """Add the job to the engine, after fetching from the store as much of its prefix as is
        worth fetching. The caller aborts the request in the engine if this raises or is
        cancelled."""
        ...

    def record_step(self, result: StepResult) -> None:
        """Learn the prefill speed from a step, and publish the blocks that the step completed."""
        ...

    async def publish_remaining(self) -> None:
        """Publish to the store the blocks that only this worker has, because it is leaving the
        cluster. Failures of the store are logged and raise nothing."""
        ...

    @property
    def link_bytes_per_second(self) -> float | None:
        """The recent transfer rate from other hosts; None before the first transfer."""
        ...

    async def run(self) -> None:
        """Run the background work until cancelled."""
        ...


@dataclass(frozen=True, slots=True)
class Migration:
    """An unfinished answer that was taken out of the batch, so that another worker can continue it.
    ``spec`` is the request as that worker will run it; the engine has pinned the blocks of
    ``sequence`` under ``spec.request_id``."""

    spec: RequestSpec
    sequence: MigratedSequence


class DecodeSide(Protocol):
    """Generates answers to prompts that another worker has computed, and lets another worker
    continue answers. Implemented by :class:`decode_worker.handler.DecodeHandler`."""

    async def start_decode(
        self, job: Job, source: WorkerRef, constraint: Constraint | None
    ) -> bool:
        """Import the job's KV from ``source`` and start decoding; return False if the answer ended
        with its first token. The caller aborts the request in the engine if this returns False,
        raises or is cancelled. Raises Unavailable, DeadlineExceeded, Invalid, NotFound, Corrupt."""
        ...

    async def begin_migration(self, job: Job) -> Migration | None:
        """Take the job's answer out of the batch and pin its KV for the next placement. Return None
        if that is not possible now; see :meth:`Engine.begin_migration`."""
        ...

    def notify_blocks_freed(self) -> None:
        """Retry the reservations that wait for free blocks, because some may have become free."""
        ...

    def sweep(self) -> None:
        """Release the blocks of abandoned transfers that have ended. Called regularly."""
        ...

    @property
    def num_imported_blocks(self) -> int:
        """The number of blocks that were imported so far."""
        ...

    @property
    def link_bytes_per_second(self) -> float | None:
        """The recent transfer rate from other hosts; None before the first transfer."""
        ...
