"""Tests that synthetic traces are valid and reproducible, have the requested rate, and share
prefixes as intended for their kind."""

from collections import defaultdict
from itertools import count, pairwise

import numpy as np
import pytest

from baton.errors import Invalid
from baton.traces.session_workload import WORKLOADS, LengthDistribution
from baton.traces.synthetic import MAX_CONTEXT_TOKENS, TRACE_GENERATORS, PromptContext
from baton.traces.trace import Trace, TraceRequest

SEED = 731


def trace_of(kind: str, num_requests: int = 2000, burstiness: float = 1.0) -> Trace:
    return TRACE_GENERATORS[kind](num_requests, 20.0, SEED, burstiness)


def sessions_of(trace: Trace) -> list[list[TraceRequest]]:
    sessions: dict[str, list[TraceRequest]] = defaultdict(list)
    for arrival in trace.requests:
        sessions[arrival.session].append(arrival)
    return list(sessions.values())


def hit_share(trace: Trace) -> float:
    """Return the hit rate of an unbounded prefix cache: the share of all prompts' blocks that are
    already cached when their prompt arrives. A block counts only if all blocks before it in the
    prompt are cached, too."""
    known, hits = set[int](), 0
    for arrival in trace.requests:
        hits += next(
            (i for i, block in enumerate(arrival.block_ids) if block not in known),
            len(arrival.block_ids),
        )
        known.update(arrival.block_ids)
    return hits / sum(len(arrival.block_ids) for arrival in trace.requests)


def test_trace_kinds() -> None:
    assert list(TRACE_GENERATORS) == ["chat", "rag", "agents", "reasoning", "few_shot", "mixed"]


@pytest.mark.parametrize("kind", TRACE_GENERATORS)
@pytest.mark.parametrize("burstiness", [1.0, 4.0])
def test_traces_are_valid(kind: str, burstiness: float) -> None:
    trace = trace_of(kind, burstiness=burstiness)
    assert (trace.name, trace.block_tokens, len(trace.requests)) == (f"{kind}-{SEED}", 64, 2000)
    times = [arrival.arrival_seconds for arrival in trace.requests]
    assert times[0] == 0.0 and times == sorted(times), f"seed {SEED}"
    for arrival in trace.requests:
        assert len(arrival.block_ids) == -(-arrival.num_prompt_tokens // 64), f"seed {SEED}"
        assert arrival.num_prompt_tokens >= 1 and arrival.num_answer_tokens >= 1, f"seed {SEED}"
        total = arrival.num_prompt_tokens + arrival.num_answer_tokens
        assert total <= MAX_CONTEXT_TOKENS, f"seed {SEED}"
        assert arrival.session.startswith(f"{arrival.tenant}-"), f"seed {SEED}"


@pytest.mark.parametrize("kind", TRACE_GENERATORS)
def test_block_id_stands_for_a_block_and_its_prefix(kind: str) -> None:
    before: dict[int, tuple[int, ...]] = {}
    for arrival in trace_of(kind).requests:
        for i, block in enumerate(arrival.block_ids):
            assert before.setdefault(block, arrival.block_ids[:i]) == arrival.block_ids[:i], (
                f"{SEED=}"
            )


@pytest.mark.parametrize("kind", TRACE_GENERATORS)
def test_the_same_seed_gives_the_same_trace(kind: str) -> None:
    trace = TRACE_GENERATORS[kind](300, 5.0, SEED, 2.0)
    assert trace == TRACE_GENERATORS[kind](300, 5.0, SEED, 2.0)
    assert trace.requests != TRACE_GENERATORS[kind](300, 5.0, SEED + 1, 2.0).requests
    assert trace.requests[:100] == TRACE_GENERATORS[kind](100, 5.0, SEED, 2.0).requests


@pytest.mark.parametrize("kind", TRACE_GENERATORS)
def test_rate_counts_all_turns_and_holds_from_the_start(kind: str) -> None:
    arrivals = trace_of(kind, 6000).requests
    for part in (arrivals[:3000], arrivals[3000:]):
        rate = len(part) / (part[-1].arrival_seconds - part[0].arrival_seconds)
        assert rate == pytest.approx(20.0, rel=0.15), f"seed {SEED}"


@pytest.mark.parametrize(("burstiness", "tolerance"), [(0.2, 0.02), (1.0, 0.1), (3.0, 0.6)])
def test_session_interarrival_times_have_the_requested_burstiness(
    burstiness: float, tolerance: float
) -> None:
    times = [arrival.arrival_seconds for arrival in trace_of("few_shot", 8000, burstiness).requests]
    gaps = np.diff(times)
    variation = float(gaps.std() / gaps.mean())
    assert variation == pytest.approx(burstiness, abs=tolerance), f"seed {SEED}"


@pytest.mark.parametrize("kind", ["chat", "agents"])
def test_turn_begins_with_the_previous_turn_and_its_answer(kind: str) -> None:
    num_pairs = 0
    for turns in sessions_of(trace_of(kind)):
        for old, new in pairwise(turns):
            num_full = old.num_prompt_tokens // 64
            assert new.block_ids[:num_full] == old.block_ids[:num_full], f"seed {SEED}"
            num_previous_tokens = old.num_prompt_tokens + old.num_answer_tokens
            assert new.num_prompt_tokens > num_previous_tokens, f"seed {SEED}"
            assert new.arrival_seconds > old.arrival_seconds + old.num_answer_tokens / 50.0, (
                f"seed {SEED}"
            )
            num_pairs += 1
    assert num_pairs > 500, f"seed {SEED}"


@pytest.mark.parametrize("kind", ["rag", "reasoning", "few_shot"])
def test_sessions_of_one_turn(kind: str) -> None:
    assert all(len(turns) == 1 for turns in sessions_of(trace_of(kind))), f"seed {SEED}"


def test_each_kind_has_its_intended_sharing() -> None:
    shares = {kind: hit_share(trace_of(kind)) for kind in TRACE_GENERATORS}
    assert shares["few_shot"] > 0.9 and shares["agents"] > 0.85, f"{shares}, seed {SEED}"
    assert 0.5 < shares["rag"] < 0.9 and 0.5 < shares["chat"] < 0.9, f"{shares}, seed {SEED}"
    assert shares["reasoning"] < 0.35, f"{shares}, seed {SEED}"


@pytest.mark.parametrize("kind", ["chat", "rag", "agents"])
def test_all_requests_share_their_first_blocks(kind: str) -> None:
    num_common = WORKLOADS[kind].prefixes.common_tokens // 64
    assert num_common >= 3
    assert len({arrival.block_ids[:num_common] for arrival in trace_of(kind).requests}) == 1


def test_three_percent_of_documents_get_sixty_percent_of_requests() -> None:
    uses: dict[int, int] = defaultdict(int)
    trace = trace_of("rag", 6000)
    for arrival in trace.requests:
        # The common blocks end at 256 tokens; the next is the document's own.
        uses[arrival.block_ids[4]] += 1
    popular = sum(sorted(uses.values(), reverse=True)[:60])
    assert popular / len(trace.requests) == pytest.approx(0.6, abs=0.05), f"seed {SEED}"


@pytest.mark.parametrize(
    ("kind", "mean_prompt", "mean_answer"),
    [("agents", 8596, 182), ("reasoning", 244, 11_000), ("few_shot", 3080, 12)],
)
def test_mean_lengths(kind: str, mean_prompt: float, mean_answer: float) -> None:
    arrivals = trace_of(kind, 6000).requests
    prompt = float(np.mean([arrival.num_prompt_tokens for arrival in arrivals]))
    answer = float(np.mean([arrival.num_answer_tokens for arrival in arrivals]))
    assert prompt == pytest.approx(mean_prompt, rel=0.25), f"seed {SEED}"
    assert answer == pytest.approx(mean_answer, rel=0.1), f"seed {SEED}"


def test_mixed_has_equally_many_requests_of_each_kind() -> None:
    arrivals = trace_of("mixed", 6000).requests
    for kind in WORKLOADS:
        share = sum(arrival.tenant == kind for arrival in arrivals) / len(arrivals)
        assert share == pytest.approx(0.2, abs=0.04), f"{kind}, seed {SEED}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1.0, 1, 1.0), "num_requests is 0; it must be from 1 to 10,000,000"),
        ((10**8, 1.0, 1, 1.0), "num_requests is 100,000,000; it must be from 1 to 10,000,000"),
        ((1, 0.0, 1, 1.0), "rate_per_second is 0.0; it must be above 0 and at most 10,000"),
        ((1, 1e5, 1, 1.0), "rate_per_second is 100000.0; it must be above 0 and at most 10,000"),
        ((1, float("nan"), 1, 1.0), "rate_per_second is nan; it must be above 0 and at most"),
        ((1, 1.0, -1, 1.0), "the seed is -1; it must not be negative"),
        ((1, 1.0, 1, 0.0), "burstiness is 0.0; it must be above 0 (1 is Poisson) and at most 10"),
        ((1, 1.0, 1, 11.0), "burstiness is 11.0; it must be above 0 (1 is Poisson) and at most 10"),
    ],
)
def test_invalid_arguments_are_rejected(
    arguments: tuple[int, float, int, float], message: str
) -> None:
    with pytest.raises(Invalid) as caught:
        TRACE_GENERATORS["chat"](*arguments)
    assert message in str(caught.value)


def test_fork_shares_only_full_blocks() -> None:
    head = PromptContext(count(), 64)
    head.extend(130)
    one, other = head.fork(), head.fork()
    one.extend(62)
    other.extend(64)
    assert one.block_ids() == (0, 1, 2)
    assert other.block_ids() == (0, 1, 3, 4)
    assert other.block_ids() == (0, 1, 3, 5)
    assert head.block_ids() == (0, 1, 6)
    assert (head.num_tokens, one.num_tokens, other.num_tokens) == (130, 192, 194)


def test_lengths_have_their_mean_and_bounds() -> None:
    generator = np.random.default_rng(SEED)
    drawn = [LengthDistribution(500, 0.8, 10**6).draw(generator) for _ in range(5000)]
    assert float(np.mean(drawn)) == pytest.approx(500, rel=0.05), f"seed {SEED}"
    cut = [LengthDistribution(2, 2.0, 4).draw(generator) for _ in range(500)]
    assert (min(cut), max(cut)) == (1, 4), f"seed {SEED}"
    assert LengthDistribution(64, 0.0, 64).draw(generator) == 64
