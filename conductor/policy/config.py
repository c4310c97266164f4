"""The settings of Baton's placement policy."""

from dataclasses import dataclass

from baton.core.worker_load import REFERENCE_PROMPT_TOKENS

SLO_MISS_PENALTY = 1e3
"""Seconds added to the score of a worker for each missed SLO; more than any queue that admission
allows."""

IDLE_QUEUE_SECONDS = 1e-3
"""A worker that can start within this time counts as idle. There is no better choice than an idle
worker, so admission does not reject on its predicted TTFT."""

MAX_MARGIN_SHARE = 0.25
"""Maximum TTFT margin, as a share of the TTFT SLO."""

MAX_LATE_MARGIN = 1 - MAX_MARGIN_SHARE
"""Maximum of :attr:`conductor.policy.snapshot.PrefillView.late_margin`. With it, hardly any request
is admitted unless a worker is about to be idle."""

MAX_UNMEASURED_TOKENS = 4 * REFERENCE_PROMPT_TOKENS
"""Maximum number of prompt tokens to be queued at a prefill worker that has not measured its speed,
apart from a single longer prompt. So many are enough for the four steps after which it knows its
speed; with more, an unknown number of them would be late."""

MAX_SHORT_PROMPT_ADVANTAGE = 0.02


@dataclass(frozen=True, slots=True)
class BatonPolicyConfig:
    """Settings of Baton's policy.

    ``service_weight``: in a score, one second of prefill counts as much as this many seconds of
    queueing. ``max_short_prompt_advantage``: if the admission rate of a prompt's length quartile
    exceeds the lowest rate of any quartile by more than this, the prompt is admitted only if memory
    for a long prompt stays free. ``ttft_margin_seconds``: a worker counts as missing the TTFT SLO
    unless its first token is predicted to come at least this long before the deadline.
    ``full_scan``: whether all prefill workers are candidates."""

    ring_candidates: int = 3
    prefix_candidates: int = 2
    least_loaded_candidates: int = 5
    decode_candidates: int = 4
    service_weight: float = 4.0
    max_short_prompt_advantage: float = MAX_SHORT_PROMPT_ADVANTAGE
    ttft_margin_seconds: float = 0.3
    admission: bool = True
    full_scan: bool = False
