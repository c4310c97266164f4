"""One placement of one request at a worker, and the outputs that end it early."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from baton.core.ids import BlockKey, RequestId
from baton.core.request import FinishReason, RequestOutput, RequestSpec
from baton.core.task import Task
from baton.errors import BatonError, Overloaded, error_mapping
from baton.worker.job_trace import JobTrace
from baton.worker.kv_export import KvExport
from baton.worker.output_stream import OutputStream
from baton.worker.prefix_fetch import PrefixFetch


class JobOutcome(StrEnum):
    """DONE: answered, or handed over. DROPPED: its router cancelled it, or left."""

    DONE = "done"
    MOVED = "moved"
    TURNED_AWAY = "turned_away"
    FAILED = "failed"
    DROPPED = "dropped"


@dataclass(slots=True, eq=False)
class Job:
    """One placement of one request, from its submission until nothing of it is left here.

    ``spec`` carries an id of its own, made of the request's id and its epoch: a placement that
    is on its way out and its successor never meet under one name, neither in the engine nor
    between workers. ``keys`` are those of its prompt's full blocks, once they are hashed. ``error``
    is why it failed; ``times`` are kept where it is traced.
    """

    request_id: RequestId
    spec: RequestSpec
    task: Task
    stream: OutputStream
    runner: asyncio.Task[None] | None = None
    hold: KvExport | None = None
    prefilled_at: float | None = None
    keys: Sequence[BlockKey] = ()
    extension: PrefixFetch | None = None
    details: dict[str, str] = field(default_factory=dict)
    error: str = ""
    times: JobTrace | None = None


def placement_id(spec: RequestSpec) -> RequestId:
    return RequestId(f"{spec.request_id}/{spec.epoch}")


def rerouted_output(spec: RequestSpec) -> RequestOutput:
    return RequestOutput(
        request_id=spec.request_id,
        epoch=spec.epoch,
        first_index=spec.num_emitted_tokens,
        token_ids=(),
        finish_reason=FinishReason.TURNED_AWAY,
    )


def migrated_output(spec: RequestSpec, num_tokens: int) -> RequestOutput:
    """``num_tokens`` are known, those of the prompt included."""
    return replace(
        rerouted_output(spec),
        first_index=num_tokens - spec.num_prompt_tokens,
        finish_reason=FinishReason.MOVED,
    )


def failed_output(spec: RequestSpec, error: BatonError) -> RequestOutput:
    details = {"error_status": error_mapping(error).grpc_status}
    if isinstance(error, Overloaded):
        details["retry_after_seconds"] = f"{error.retry_after_seconds:.3f}"
    return RequestOutput(
        request_id=spec.request_id,
        epoch=spec.epoch,
        first_index=spec.num_emitted_tokens,
        token_ids=(),
        finish_reason=FinishReason.ERROR,
        error=str(error),
        details=details,
    )
