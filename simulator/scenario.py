"""A simulation's scenario, built from the flags of ``baton simulate`` and ``baton plan``."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from baton.core.ids import WorkerId
from baton.errors import Invalid
from baton.traces.files import add_jitter, read_trace, scale_rate
from baton.traces.synthetic import MAX_BURSTINESS, MAX_REQUESTS, TRACE_GENERATORS
from baton.traces.trace import Trace
from conductor.policy.baselines import BASELINES
from conductor.policy.config import BatonPolicyConfig
from conductor.policy.policies import DEFAULT_POLICY, PLACEMENT_POLICIES, get_policy
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.faults import Faults, WorkerCrash, WorkerSlowdown
from simulator.flag_checks import check_at_least, check_at_most, check_positive

PEER_FETCH_POLICIES = ("min_ttft", "min_ttft_no_reject")
"""Baselines that, according to their publication, fetch from peers' stores."""

NO_FAULTS = Faults()

DEFAULT_KIND, DEFAULT_RATE = "chat", 8.0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """A trace from a file, or a synthetic one. If ``rate`` is None, a file keeps its own rate, and
    a synthetic trace gets the default rate. The rate is multiplied by ``rate_factor``."""

    trace: Path | None
    kind: str | None
    requests: int
    rate: float | None
    burstiness: float
    rate_factor: float
    jitter_seconds: float
    seed: int

    def __post_init__(self) -> None:
        """Check the values. Raises Invalid, which names the flag, for a value out of range, and if
        both ``trace`` and ``kind`` are given."""
        if self.trace is not None and self.kind is not None:
            raise Invalid("--trace and --kind can't be combined")
        if self.kind is not None and self.kind not in TRACE_GENERATORS:
            raise Invalid(
                f"--kind is {self.kind!r}; it must be one of {', '.join(TRACE_GENERATORS)}"
            )
        if self.rate is not None:
            check_positive("--rate", self.rate)
        check_positive("--rate-factor", self.rate_factor)
        check_at_least("--seed", self.seed, 0)
        if self.trace is None:
            check_at_most("--requests", self.requests, MAX_REQUESTS)
            if not 0 < self.burstiness <= MAX_BURSTINESS:
                raise Invalid(
                    f"--burstiness is {self.burstiness:g}; it must be above 0 (1 is Poisson) and "
                    f"at most {MAX_BURSTINESS:g}"
                )
        elif not 0 <= self.jitter_seconds < math.inf:
            raise Invalid(
                f"--jitter-seconds is {self.jitter_seconds:g}; it must be finite and at least 0"
            )

    @property
    def is_random(self) -> bool:
        """Whether the trace depends on the seed."""
        return self.trace is None or self.jitter_seconds > 0

    @cached_property
    def trace_at_requested_rate(self) -> Trace:
        """The trace at ``rate`` times ``rate_factor``."""
        rate = self.rate
        if self.trace is None:
            return self.at_rate((rate or DEFAULT_RATE) * self.rate_factor, self.seed)
        factor = self.rate_factor * (rate / mean_rate(self._file) if rate else 1.0)
        return self._scaled_file_trace(factor, self.seed)

    def at_rate(self, rate: float, seed: int) -> Trace:
        """Return the trace at ``rate`` requests per second; ``rate_factor`` is not applied. Raises
        Invalid if the trace's file can't be read or is invalid, if all its requests arrive at once,
        or if the rate is out of range."""
        if self.trace is None:
            kind = TRACE_GENERATORS[self.kind or DEFAULT_KIND]
            return kind(self.requests, rate, seed, self.burstiness)
        return self._scaled_file_trace(rate / mean_rate(self._file), seed)

    @cached_property
    def _file(self) -> Trace:
        assert self.trace is not None
        return read_trace(self.trace)

    def _scaled_file_trace(self, factor: float, seed: int) -> Trace:
        spread = add_jitter(self._file, seed, self.jitter_seconds)
        return scale_rate(spread if self.jitter_seconds else self._file, factor)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A cluster and its faults, ready to run under any policy. If ``as_deployed`` is true, a
    baseline policy runs only with the features that its publication describes, without Baton's
    additions. ``policy_config`` has the settings of Baton's policy."""

    config: ClusterConfig
    faults: Faults = NO_FAULTS
    as_deployed: bool = False
    policy_config: BatonPolicyConfig = field(default_factory=BatonPolicyConfig)

    def run(self, trace: Trace, policy: str, give_up_misses: int | None = None) -> SimulatedCluster:
        config = self.config
        if self.as_deployed and policy in BASELINES:
            config = replace(config, prefill_order="fcfs", peer_fetch=policy in PEER_FETCH_POLICIES)
        cluster = SimulatedCluster(
            config, trace, get_policy(policy, self.policy_config), self.faults
        )
        cluster.run(give_up_misses)
        return cluster


def parse_policies(names: str) -> list[str]:
    """Parse ``all`` or comma-separated policy names, and drop duplicates. Raises Invalid for an
    unknown name."""
    if names == "all":
        return list(PLACEMENT_POLICIES)
    found = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in found:
        get_policy(name)
    return found or [DEFAULT_POLICY]


def parse_faults(kills: Sequence[str], slows: Sequence[str], config: ClusterConfig) -> Faults:
    """Parse crashes like ``p3@120:30`` (worker p3 crashes at 120 s and is back after 30 s) and
    slowdowns like ``p1x2.0`` (each step of worker p1 takes twice as long). Raises Invalid for
    malformed texts and unknown workers."""
    return Faults(
        tuple(_parse_crash(kill, config) for kill in kills),
        tuple(_parse_slowdown(slow, config) for slow in slows),
    )


_NUMBER = r"(\d+(?:\.\d+)?)"
_CRASH = re.compile(rf"([pdm]\d+)@{_NUMBER}:{_NUMBER}")
_SLOW = re.compile(rf"([pdm]\d+)x{_NUMBER}")


def _parse_crash(text: str, config: ClusterConfig) -> WorkerCrash:
    match = _CRASH.fullmatch(text)
    if match is None:
        raise Invalid(f"--kill is {text!r}; it must be WORKER@SECOND:SECONDS, like p3@120:30")
    return WorkerCrash(_worker(match[1], config), float(match[2]), float(match[3]))


def _parse_slowdown(text: str, config: ClusterConfig) -> WorkerSlowdown:
    match = _SLOW.fullmatch(text)
    if match is None:
        raise Invalid(f"--slow is {text!r}; it must be WORKERxFACTOR, like p1x2.0")
    check_positive(f"the factor of --slow {match[1]}", float(match[2]))
    return WorkerSlowdown(_worker(match[1], config), float(match[2]))


def _worker(name: str, config: ClusterConfig) -> WorkerId:
    sizes = {"p": config.num_prefill, "d": config.num_decode, "m": config.num_mixed}
    if int(name[1:]) >= sizes[name[0]] or str(int(name[1:])) != name[1:]:
        known = ", ".join(f"{kind}0 to {kind}{size - 1}" for kind, size in sizes.items() if size)
        raise Invalid(f"there is no worker {name!r}; the workers are {known}")
    return WorkerId(name)


def mean_rate(trace: Trace) -> float:
    """Return a trace's requests per second. Raises Invalid if all requests come at once."""
    last = trace.requests[-1].arrival_seconds
    if last <= 0:
        raise Invalid(f"{trace.name}: all requests arrive at once, so no rate can be set")
    return len(trace.requests) / last
