"""What a simulated cluster consists of."""

from dataclasses import dataclass

from baton.core.cost import DecodeCost, PrefillCost
from conductor.policy.snapshot import LinkSpeed
from simulator.autoscaling import SimulatedAutoscalingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Workers are spread over ``num_hosts``, each with a store of ``node_tokens``; 0 means that
    every worker has a host of its own. Workers report every ``report_seconds``; 0 means that the
    conductor knows everything at once. ``peer_fetch``: whether a decision's ``reuse`` is followed.
    ``decodes_read``: whether decode workers may read a prompt themselves. Of ``num_conductors``,
    each gets every so many-th request, and knows of the others' only by the workers' reports. With
    ``elastic``, both pools begin with so many, and follow the load."""

    num_prefill: int
    num_decode: int
    prefill_cost: PrefillCost
    decode_cost: DecodeCost
    kv_bytes_per_token: int
    device_tokens: int
    node_tokens: int
    link: LinkSpeed
    order: str = "deadline"
    step_tokens: int = 4096
    max_batch: int = 256
    first_token_seconds: float = 2.0
    token_gap_seconds: float = 0.05
    report_seconds: float = 0.0
    peer_fetch: bool = True
    num_conductors: int = 1
    num_hosts: int = 0
    decodes_read: bool = True
    elastic: SimulatedAutoscalingConfig | None = None
