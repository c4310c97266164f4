"""The costs and the KV capacity of a worker."""

from dataclasses import dataclass

from baton.core.cost import DecodeCost, PrefillCost
from simulator.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """Costs and KV capacity of one worker, which may have several GPUs."""

    prefill: PrefillCost
    decode: DecodeCost
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    step: StepCost
