"""The memory and threads that all requests of a router share, each with a bound."""

from dataclasses import dataclass, field

from router.http.raw_body import BodyBudget
from router.openai.offload_executor import OffloadExecutor
from router.openai.prompt_logprobs_budget import PromptLogprobsBudget


@dataclass(slots=True)
class RequestResources:
    """Memory for bodies and for logprobs of prompts, and threads for long computations."""

    body_budget: BodyBudget
    prompt_logprobs_budget: PromptLogprobsBudget = field(default_factory=PromptLogprobsBudget)
    offload_executor: OffloadExecutor = field(default_factory=OffloadExecutor)
