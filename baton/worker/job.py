"""A job, which is one placement of a request on a worker, and the outputs that end a job early."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from baton.core.ids import BlockKey, RequestId
from baton.core.request import FinishReason, RequestOutput, RequestSpec
from baton.core.task import Task
from baton.errors import BatonError, Overloaded, error_mapping
from baton.worker.job_trace import JobTrace
from baton.worker.output_stream import OutputStream
from baton.worker.prefix_fetch_stats import PrefixFetchStats


class JobOutcome(StrEnum):
    """How a job ended. DONE means that it finished or its KV was exported; MIGRATED that its answer
    continues on another worker; REROUTED that it was waiting in the engine's queue and must be
    placed on another worker; FAILED that it ended with an error; CANCELLED that its router
    cancelled it or disconnected."""

    DONE = "done"
    MIGRATED = "migrated"
    REROUTED = "rerouted"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Job:
    """One placement of a request, from its submission until its resources are freed.

    ``spec.request_id`` is the placement's id, made of the request's id and its epoch. So a
    placement that is being ended and its successor never have the same id, neither in the engine
    nor between workers. ``keys`` are the block keys of the prompt's full blocks; it is empty until
    they have been computed. ``is_answered`` means that the answer ended with its first token:
    nothing will be decoded, and the job only waits for the end of the KV transfer that has begun.
    ``admission_task`` adds the job to the engine. ``prefilled_at`` is the time at which all KV that
    the job exports had been computed. ``error`` is the reason for a failure; ``trace`` is set only
    if the request is traced."""

    request_id: RequestId
    spec: RequestSpec
    task: Task
    stream: OutputStream
    is_answered: bool = False
    admission_task: asyncio.Task[None] | None = None
    prefilled_at: float | None = None
    keys: Sequence[BlockKey] = ()
    prefix_fetch: PrefixFetchStats | None = None
    details: dict[str, str] = field(default_factory=dict)
    error: str = ""
    trace: JobTrace | None = None


def placement_id(spec: RequestSpec) -> RequestId:
    return RequestId(f"{spec.request_id}/{spec.epoch}")


def rerouted_output(spec: RequestSpec) -> RequestOutput:
    return RequestOutput(
        request_id=spec.request_id,
        epoch=spec.epoch,
        first_index=spec.num_emitted_tokens,
        token_ids=(),
        finish_reason=FinishReason.REROUTED,
    )


def migrated_output(spec: RequestSpec, num_tokens: int) -> RequestOutput:
    """Build the output that ends a migrated answer. ``num_tokens`` counts the tokens of the prompt
    and of the answer so far, together."""
    return replace(
        rerouted_output(spec),
        first_index=num_tokens - spec.num_prompt_tokens,
        finish_reason=FinishReason.MIGRATED,
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
