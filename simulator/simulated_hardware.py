"""The hardware of a simulated cluster, built from the flags of ``baton simulate`` and
``baton plan``."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from baton.core.prefill_order import PREFILL_ORDERS
from baton.errors import Invalid
from conductor.policy.snapshot import LinkSpeed
from simulator.cluster_config import ClusterConfig
from simulator.cost_table import costs_from_table
from simulator.flag_checks import check_at_least, check_at_most, check_positive
from simulator.hardware import GIB, get_gpu
from simulator.model_shapes import get_model_shape
from simulator.parallelism import POOLS, Parallelism, PoolParallelism
from simulator.roofline import parallel_roofline
from simulator.step_cost import WorkerCosts

STORE_BYTES_PER_GPU = 256 * GIB
"""Host memory for the KV store per GPU, as on hosts with eight GPUs and 2 TB of memory."""

MAX_WORKERS_PER_POOL = 4096
"""Maximum number of workers per pool. It is bounded since the simulator keeps every worker's caches
in memory."""


@dataclass(frozen=True, kw_only=True)
class SimulatedHardware:
    """The workers' hardware, and the links between the workers. ``costs`` is the file with a table
    of measurements; if it is None, costs are computed from the model and the GPU. ``device_tokens``
    is a worker's KV capacity; if it is None, the capacity follows, like the costs, from the table
    or from the model and the GPU. ``node_tokens`` is the capacity of a host's store; if it is None,
    the capacity follows from :data:`STORE_BYTES_PER_GPU`. ``tbt_slo`` is the SLO for the mean
    inter-token latency. SLOs are in seconds.

    A worker has ``gpus_per_worker`` GPUs (if None, one) that share the model by tensor parallelism.
    ``prefill_tp``, ``decode_tp`` and ``mixed_tp`` set a pool's tensor-parallel size instead, and
    ``prefill_ep``, ``decode_ep`` and ``mixed_ep`` its expert-parallel size (if None, 1). A table of
    measurements is of workers as they are; then ``gpus_per_worker`` determines only prices and the
    size of stores."""

    model: str
    gpu: str
    gpus_per_worker: int | None
    costs: Path | None
    link_gbytes: float
    host_gbytes: float
    device_tokens: int | None
    node_tokens: int | None
    hosts: int
    order: str
    report_seconds: float
    conductors: int
    ttft_slo: float
    tbt_slo: float
    prefill_tp: int | None = None
    decode_tp: int | None = None
    mixed_tp: int | None = None
    prefill_ep: int | None = None
    decode_ep: int | None = None
    mixed_ep: int | None = None

    @property
    def fixes_gpus_per_worker(self) -> bool:
        return self.gpus_per_worker is not None or self.costs is not None

    @property
    def parallelism(self) -> PoolParallelism:
        def of_pool(pool: str) -> Parallelism:
            tensor, expert = getattr(self, f"{pool}_tp"), getattr(self, f"{pool}_ep")
            return Parallelism(tensor or self.gpus_per_worker or 1, expert or 1)

        return PoolParallelism(*map(of_pool, POOLS))

    def with_parallelism(self, pools: PoolParallelism) -> "SimulatedHardware":
        """Return the same hardware with these sizes."""
        sizes: dict[str, Any] = {"gpus_per_worker": None}
        for pool, size in zip(POOLS, pools, strict=True):
            sizes |= {f"{pool}_tp": size.tensor, f"{pool}_ep": size.expert}
        return replace(self, **sizes)

    def config(self, num_prefill: int, num_decode: int, num_mixed: int = 0) -> ClusterConfig:
        """Build the configuration of a cluster with the two pools, with ``num_mixed`` workers that
        do both, or with all of them. Raises Invalid for any invalid value."""
        self.check()
        if num_mixed != 0:
            check_at_most("--mixed", num_mixed, MAX_WORKERS_PER_POOL)
        if num_mixed == 0 or num_prefill != 0 or num_decode != 0:
            check_at_most("--prefill", num_prefill, MAX_WORKERS_PER_POOL)
            check_at_most("--decode", num_decode, MAX_WORKERS_PER_POOL)
        pools, node = self.parallelism, self.node_tokens
        first = pools.prefill if num_prefill else pools.mixed
        costs = self.worker_costs(first)
        memory = STORE_BYTES_PER_GPU * first.num_gpus
        return ClusterConfig(
            num_prefill=num_prefill,
            num_decode=num_decode,
            prefill_cost=costs.prefill,
            decode_cost=costs.decode,
            kv_bytes_per_token=costs.kv_bytes_per_token,
            device_tokens=costs.kv_capacity_tokens,
            node_tokens=memory // costs.kv_bytes_per_token if node is None else node,
            link=LinkSpeed(self.link_gbytes * 1e9, self.host_gbytes * 1e9),
            prefill_order=self.order,
            ttft_slo_seconds=self.ttft_slo,
            itl_slo_seconds=self.tbt_slo,
            report_seconds=self.report_seconds,
            num_conductors=self.conductors,
            num_hosts=self.hosts,
            num_mixed=num_mixed,
            step_cost=costs.step,
            decode_worker=self.worker_costs(pools.decode) if num_decode else None,
            mixed_worker=self.worker_costs(pools.mixed) if num_mixed else None,
        )

    def worker_costs(self, parallelism: Parallelism) -> WorkerCosts:
        """Return the costs of a worker, from the table of measurements if there is one, otherwise
        from the model, the GPU and ``parallelism``."""
        gpu, shape = get_gpu(self.gpu), get_model_shape(self.model)
        costs = self._table or parallel_roofline(gpu, shape, parallelism)
        tokens = self.device_tokens
        return costs if tokens is None else replace(costs, kv_capacity_tokens=tokens)

    def check(self) -> None:
        """Raise Invalid, which names the flag, for a value out of range. Whether the model fits is
        checked with the costs."""
        check_positive("--link-gbytes", self.link_gbytes)
        check_positive("--host-gbytes", self.host_gbytes)
        check_positive("--ttft-slo", self.ttft_slo)
        check_positive("--tbt-slo", self.tbt_slo)
        self._check_parallelism()
        check_at_most("--conductors", self.conductors, MAX_WORKERS_PER_POOL)
        if self.device_tokens is not None:
            check_at_least("--device-tokens", self.device_tokens, 1)
        if self.node_tokens is not None:
            check_at_least("--node-tokens", self.node_tokens, 0)
        check_at_least("--hosts", self.hosts, 0)
        if not 0 <= self.report_seconds < math.inf:
            raise Invalid(
                f"--report-seconds is {self.report_seconds}; it must be finite and at least 0"
            )
        if self.order not in PREFILL_ORDERS:
            raise Invalid(
                f"--order is {self.order!r}; it must be one of {', '.join(PREFILL_ORDERS)}"
            )

    def _check_parallelism(self) -> None:
        if self.gpus_per_worker is not None:
            check_at_least("--gpus-per-worker", self.gpus_per_worker, 1)
        for pool in POOLS:
            for kind in ("tp", "ep"):
                flag, size = f"--{pool}-{kind}", getattr(self, f"{pool}_{kind}")
                if size is None:
                    continue
                check_at_least(flag, size, 1)
                if self.costs is not None:
                    raise Invalid(
                        f"{flag} and --costs can't be combined: a table has the times of a worker "
                        "as it was measured"
                    )

    @cached_property
    def _table(self) -> WorkerCosts | None:
        return None if self.costs is None else costs_from_table(self.costs)
