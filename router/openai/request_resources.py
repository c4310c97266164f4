"""The memory and threads that all requests of a router share, each with a bound."""

from dataclasses import dataclass, field

from router.http.raw_body import BodyBudget
from router.openai.logprobs_budget import LogprobsBudget
from router.openai.offload_executor import OffloadExecutor
from router.openai.stored_bytes import StoredBytesBudget


@dataclass(slots=True)
class RequestResources:
    """Memory for bodies, for logprobs and for stored responses, and threads for long
    computations."""

    body_budget: BodyBudget
    logprobs_budget: LogprobsBudget = field(default_factory=LogprobsBudget)
    stored_bytes: StoredBytesBudget = field(default_factory=StoredBytesBudget)
    offload_executor: OffloadExecutor = field(default_factory=OffloadExecutor)
