"""A small cluster that is simulated exactly. A fleet's requests are drawn from its requests."""

from dataclasses import replace

from baton.errors import Invalid
from baton.traces.trace import Trace
from conductor.policy.policies import DEFAULT_POLICY, get_policy
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.large_fleet.sample import RequestSample, sample_of
from simulator.scenario import Traffic


def simulate_cell(
    traffic: Traffic, fleet: ClusterConfig, rate_per_second: float, num_workers: int
) -> RequestSample:
    """Simulate ``num_workers`` workers of a fleet exactly, with their share of the fleet's rate.
    Return their requests. Raises Invalid if there are fewer than two workers."""
    if num_workers < 2:
        raise Invalid(f"a cell has {num_workers} workers; it must have at least two")
    config = cell_of(fleet, num_workers)
    share = (config.num_prefill + config.num_decode) / (fleet.num_prefill + fleet.num_decode)
    trace = traffic.at_rate(rate_per_second * share, traffic.seed)
    return sample_of(run_cell(config, trace), trace.block_tokens)


def cell_of(fleet: ClusterConfig, num_workers: int) -> ClusterConfig:
    """Return a cluster of about ``num_workers`` workers with the pools' proportions of ``fleet``,
    and one conductor that knows everything at once."""
    share = num_workers / (fleet.num_prefill + fleet.num_decode)
    return replace(
        fleet,
        num_prefill=max(round(fleet.num_prefill * share), 1),
        num_decode=max(round(fleet.num_decode * share), 1),
        num_conductors=1,
        report_seconds=0.0,
        num_hosts=0,
    )


def run_cell(config: ClusterConfig, trace: Trace) -> SimulatedCluster:
    cluster = SimulatedCluster(config, trace, get_policy(DEFAULT_POLICY))
    cluster.run()
    return cluster
