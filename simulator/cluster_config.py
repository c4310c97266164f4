"""The configuration of a simulated cluster."""

from dataclasses import dataclass

from baton.core.cost import DecodeCost, PrefillCost
from conductor.policy.snapshot import LinkSpeed
from simulator.autoscaling import SimulatedAutoscalingConfig
from simulator.step_cost import StepCost, WorkerCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Workers are spread over ``num_hosts`` hosts; if that is 0, every worker has its own host.
    Each host has a store of ``node_tokens`` tokens. Workers report their load every
    ``report_seconds``; 0 means that conductors always have current reports. If ``peer_fetch`` is
    true, prefixes are fetched from the store node that the decision names (``fetch_source``). If
    ``allow_local_prefill`` is true, decode workers may prefill prompts themselves. The requests are
    distributed round-robin over ``num_conductors``; each conductor knows of the others' requests
    only from the workers' reports. If ``autoscaling`` is given, both pools start at the configured
    sizes and follow the load.

    ``num_mixed`` workers compute prompts and answers in the same steps, of at most ``mixed_tokens``
    tokens; a cluster may have such workers, the two pools, or all of them.
    ``device_block_tokens`` is the size of their blocks of KV. If ``step_cost`` is None, it follows
    from the other costs.

    ``prefill_cost``, ``decode_cost``, ``step_cost`` and ``device_tokens`` are those of all workers,
    unless ``decode_worker`` or ``mixed_worker`` say otherwise for a pool. The TTFT SLO is on top of
    what a prompt takes by ``deadline_cost``; if that is None, by ``prefill_cost``.

    If ``shared_speeds`` is given, workers share the cores of their host, and its elements are the
    speed of each busy worker while one, two, … of them are busy; costs are those of speed 1. A
    first element below 1 is what the host's other processes take (:class:`SharedCores`).
    Conductors don't know of it."""

    num_prefill: int
    num_decode: int
    prefill_cost: PrefillCost
    decode_cost: DecodeCost
    kv_bytes_per_token: int
    device_tokens: int
    node_tokens: int
    link: LinkSpeed
    prefill_order: str = "deadline"
    step_tokens: int = 4096
    max_batch: int = 256
    ttft_slo_seconds: float = 2.0
    itl_slo_seconds: float = 0.05
    report_seconds: float = 0.0
    peer_fetch: bool = True
    num_conductors: int = 1
    num_hosts: int = 0
    allow_local_prefill: bool = True
    autoscaling: SimulatedAutoscalingConfig | None = None
    num_mixed: int = 0
    mixed_tokens: int = 2048
    device_block_tokens: int = 16
    step_cost: StepCost | None = None
    decode_worker: WorkerCosts | None = None
    mixed_worker: WorkerCosts | None = None
    deadline_cost: PrefillCost | None = None
    shared_speeds: tuple[float, ...] = ()

    @property
    def decode_costs(self) -> WorkerCosts:
        return self.decode_worker or self._common_costs

    @property
    def mixed_costs(self) -> WorkerCosts:
        return self.mixed_worker or self._common_costs

    @property
    def _common_costs(self) -> WorkerCosts:
        return WorkerCosts(
            self.prefill_cost,
            self.decode_cost,
            self.kv_bytes_per_token,
            self.device_tokens,
            self.step_cost or StepCost.from_measured(self.prefill_cost, self.decode_cost),
        )
