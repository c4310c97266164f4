"""The memory and threads that all requests of a router share, each with a bound."""

from dataclasses import dataclass, field

from router.http.raw_body import BodyBudget
from router.openai.logprobs_budget import LogprobsBudget
from router.openai.offload_executor import OffloadExecutor


@dataclass(slots=True)
class RequestResources:
    """Memory for bodies and for logprobs, and threads for long computations."""

    body_budget: BodyBudget
    logprobs_budget: LogprobsBudget = field(default_factory=LogprobsBudget)
    offload_executor: OffloadExecutor = field(default_factory=OffloadExecutor)
