"""Estimates which rate of requests a cluster sustains, from its costs alone. It is used to order
clusters before they are simulated: caches, waiting and transfers are left out."""

from dataclasses import dataclass

from baton.traces.trace import Trace
from simulator.cluster_config import ClusterConfig
from simulator.worker_costs import WorkerCosts


@dataclass(frozen=True, slots=True)
class MeanRequest:
    """The mean lengths of a trace's prompts and answers, in tokens."""

    prompt_tokens: int
    answer_tokens: int

    @classmethod
    def of(cls, trace: Trace) -> "MeanRequest":
        count = len(trace.requests)
        prompts = sum(each.num_prompt_tokens for each in trace.requests)
        answers = sum(each.num_answer_tokens for each in trace.requests)
        return cls(max(prompts // count, 1), max(answers // count, 1))

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens // 2


def estimated_rate(config: ClusterConfig, mean: MeanRequest) -> float:
    """Return the estimate in requests per second: that of the slower pool, and of the mixed
    workers."""
    prompt_seconds = config.prefill_cost.seconds(mean.prompt_tokens)
    answer_seconds = _answer_seconds(config, config.decode_costs, mean)
    pools = min(config.num_prefill / prompt_seconds, config.num_decode / answer_seconds)
    mixed = config.mixed_costs
    mixed_seconds = mixed.prefill.seconds(mean.prompt_tokens)
    mixed_seconds += _answer_seconds(config, mixed, mean)
    return pools + config.num_mixed / mixed_seconds


def _answer_seconds(config: ClusterConfig, costs: WorkerCosts, mean: MeanRequest) -> float:
    """Return a worker's time per answer in its largest batch within the ITL SLO and its memory; at
    least one answer."""
    low, high = 1, config.max_batch
    while low < high:
        middle = (low + high + 1) // 2
        tokens = middle * mean.context_tokens
        seconds = costs.decode.seconds(middle, tokens)
        fits = tokens <= costs.kv_capacity_tokens and seconds <= config.itl_slo_seconds
        low, high = (middle, high) if fits else (low, middle - 1)
    return mean.answer_tokens * costs.decode.seconds(low, low * mean.context_tokens) / low
