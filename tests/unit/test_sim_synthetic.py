"""Synthetic traces: sound, repeatable, at their rate, and each with the sharing it is made for."""

from collections import defaultdict
from itertools import count, pairwise

import numpy as np
import pytest

from baton.errors import Invalid
from baton.traces.prompt_context import PromptContext
from baton.traces.session_workload import WORKLOADS, LengthDistribution
from baton.traces.synthetic import MAX_CONTEXT_TOKENS, TRACE_GENERATORS
from baton.traces.trace import Trace, TraceRequest

SEED = 731


def trace_of(kind: str, num_requests: int = 2000, burstiness: float = 1.0) -> Trace:
    return TRACE_GENERATORS[kind](num_requests, 20.0, SEED, burstiness)


def sessions_of(trace: Trace) -> list[list[TraceRequest]]:
    sessions: dict[str, list[TraceRequest]] = defaultdict(list)
    for arrival in trace.arrivals:
        sessions[arrival.session].append(arrival)
    return list(sessions.values())


def hit_share(trace: Trace) -> float:
    """Of blocks, with a cache that forgets nothing."""
    seen, hits = set[int](), 0
    for arrival in trace.arrivals:
        hits += next(
            (i for i, block in enumerate(arrival.blocks) if block not in seen), len(arrival.blocks)
        )
        seen.update(arrival.blocks)
    return hits / sum(len(arrival.blocks) for arrival in trace.arrivals)


def test_the_kinds() -> None:
    assert list(TRACE_GENERATORS) == ["chat", "rag", "agents", "reasoning", "few_shot", "mixed"]


@pytest.mark.parametrize("kind", TRACE_GENERATORS)
@pytest.mark.parametrize("burstiness", [1.0, 4.0])
def test_sound(kind: str, burstiness: float) -> None:
    trace = trace_of(kind, burstiness=burstiness)
    assert (trace.name, trace.block_tokens, len(trace.arrivals)) == (f"{kind}-{SEED}", 64, 2000)
    times = [arrival.at_seconds for arrival in trace.arrivals]
    assert times[0] == 0.0 and times == sorted(times), f"seed {SEED}"
    for arrival in trace.arrivals:
        assert len(arrival.blocks) == -(-arrival.num_prompt_tokens // 64), f"seed {SEED}"
        assert arrival.num_prompt_tokens >= 1 and arrival.num_answer_tokens >= 1, f"seed {SEED}"
        total = arrival.num_prompt_tokens + arrival.num_answer_tokens
        assert total <= MAX_CONTEXT_TOKENS, f"seed {SEED}"
        assert arrival.session.startswith(f"{arrival.tenant}-"), f"seed {SEED}"


@pytest.mark.parametrize("kind", TRACE_GENERATORS)
def test_an_id_stands_for_a_block_and_all_before_it(kind: str) -> None:
    before: dict[int, tuple[int, ...]] = {}
    for arrival in trace_of(kind).arrivals:
        for i, block in enumerate(arrival.blocks):
            assert before.setdefault(block, arrival.blocks[:i]) == arrival.blocks[:i], f"{SEED=}"


@pytest.mark.parametrize("kind", TRACE_GENERATORS)
def test_the_same_seed_gives_the_same_trace(kind: str) -> None:
    trace = TRACE_GENERATORS[kind](300, 5.0, SEED, 2.0)
    assert trace == TRACE_GENERATORS[kind](300, 5.0, SEED, 2.0)
    assert trace.arrivals != TRACE_GENERATORS[kind](300, 5.0, SEED + 1, 2.0).arrivals
    assert trace.arrivals[:100] == TRACE_GENERATORS[kind](100, 5.0, SEED, 2.0).arrivals


@pytest.mark.parametrize("kind", TRACE_GENERATORS)
def test_the_rate_counts_all_turns_and_holds_from_the_start(kind: str) -> None:
    arrivals = trace_of(kind, 6000).arrivals
    for part in (arrivals[:3000], arrivals[3000:]):
        rate = len(part) / (part[-1].at_seconds - part[0].at_seconds)
        assert rate == pytest.approx(20.0, rel=0.15), f"seed {SEED}"


@pytest.mark.parametrize(("burstiness", "tolerance"), [(0.2, 0.02), (1.0, 0.1), (3.0, 0.6)])
def test_gaps_between_sessions_vary_as_asked(burstiness: float, tolerance: float) -> None:
    times = [arrival.at_seconds for arrival in trace_of("few_shot", 8000, burstiness).arrivals]
    gaps = np.diff(times)
    variation = float(gaps.std() / gaps.mean())
    assert variation == pytest.approx(burstiness, abs=tolerance), f"seed {SEED}"


@pytest.mark.parametrize("kind", ["chat", "agents"])
def test_a_turn_begins_with_the_turn_before_and_its_answer(kind: str) -> None:
    num_pairs = 0
    for turns in sessions_of(trace_of(kind)):
        for old, new in pairwise(turns):
            num_full = old.num_prompt_tokens // 64
            assert new.blocks[:num_full] == old.blocks[:num_full], f"seed {SEED}"
            said = old.num_prompt_tokens + old.num_answer_tokens
            assert new.num_prompt_tokens > said, f"seed {SEED}"
            assert new.at_seconds > old.at_seconds + old.num_answer_tokens / 50.0, f"seed {SEED}"
            num_pairs += 1
    assert num_pairs > 500, f"seed {SEED}"


@pytest.mark.parametrize("kind", ["rag", "reasoning", "few_shot"])
def test_one_turn_a_session(kind: str) -> None:
    assert all(len(turns) == 1 for turns in sessions_of(trace_of(kind))), f"seed {SEED}"


def test_each_kind_shares_what_it_is_made_to_share() -> None:
    shares = {kind: hit_share(trace_of(kind)) for kind in TRACE_GENERATORS}
    assert shares["few_shot"] > 0.9 and shares["agents"] > 0.85, f"{shares}, seed {SEED}"
    assert 0.5 < shares["rag"] < 0.9 and 0.5 < shares["chat"] < 0.9, f"{shares}, seed {SEED}"
    assert shares["reasoning"] < 0.35, f"{shares}, seed {SEED}"


@pytest.mark.parametrize("kind", ["chat", "rag", "agents"])
def test_all_requests_share_their_first_blocks(kind: str) -> None:
    num_common = WORKLOADS[kind].heads.common_tokens // 64
    assert num_common >= 3
    assert len({arrival.blocks[:num_common] for arrival in trace_of(kind).arrivals}) == 1


def test_three_percent_of_the_documents_get_some_sixty_percent_of_the_requests() -> None:
    uses: dict[int, int] = defaultdict(int)
    trace = trace_of("rag", 6000)
    for arrival in trace.arrivals:
        # The blocks that all share end at 256 tokens; the next is the document's own.
        uses[arrival.blocks[4]] += 1
    popular = sum(sorted(uses.values(), reverse=True)[:60])
    assert popular / len(trace.arrivals) == pytest.approx(0.6, abs=0.05), f"seed {SEED}"


@pytest.mark.parametrize(
    ("kind", "mean_prompt", "mean_answer"),
    [("agents", 8596, 182), ("reasoning", 244, 11_000), ("few_shot", 3080, 12)],
)
def test_mean_lengths(kind: str, mean_prompt: float, mean_answer: float) -> None:
    arrivals = trace_of(kind, 6000).arrivals
    prompt = float(np.mean([arrival.num_prompt_tokens for arrival in arrivals]))
    answer = float(np.mean([arrival.num_answer_tokens for arrival in arrivals]))
    assert prompt == pytest.approx(mean_prompt, rel=0.25), f"seed {SEED}"
    assert answer == pytest.approx(mean_answer, rel=0.1), f"seed {SEED}"


def test_mixed_has_as_many_requests_of_each() -> None:
    arrivals = trace_of("mixed", 6000).arrivals
    for kind in WORKLOADS:
        share = sum(arrival.tenant == kind for arrival in arrivals) / len(arrivals)
        assert share == pytest.approx(0.2, abs=0.04), f"{kind}, seed {SEED}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1.0, 1, 1.0), "0 requests; it must be from 1 to 10,000,000"),
        ((10**8, 1.0, 1, 1.0), "100,000,000 requests; it must be from 1 to 10,000,000"),
        ((1, 0.0, 1, 1.0), "0.0 requests per second; it must be above 0 and at most 10,000"),
        ((1, 1e5, 1, 1.0), "100000.0 requests per second; it must be above 0 and at most 10,000"),
        ((1, float("nan"), 1, 1.0), "nan requests per second; it must be above 0 and at most"),
        ((1, 1.0, -1, 1.0), "the seed is -1; it must not be negative"),
        ((1, 1.0, 1, 0.0), "burstiness 0.0; it must be above 0 (1 is Poisson) and at most 10"),
        ((1, 1.0, 1, 11.0), "burstiness 11.0; it must be above 0 (1 is Poisson) and at most 10"),
    ],
)
def test_wrong_arguments(arguments: tuple[int, float, int, float], message: str) -> None:
    with pytest.raises(Invalid) as caught:
        TRACE_GENERATORS["chat"](*arguments)
    assert message in str(caught.value)


def test_a_fork_shares_full_blocks_alone() -> None:
    head = PromptContext(count(), 64)
    head.extend(130)
    one, other = head.fork(), head.fork()
    one.extend(62)
    other.extend(64)
    assert one.blocks() == (0, 1, 2)
    assert other.blocks() == (0, 1, 3, 4)
    assert other.blocks() == (0, 1, 3, 5)
    assert head.blocks() == (0, 1, 6)
    assert (head.num_tokens, one.num_tokens, other.num_tokens) == (130, 192, 194)


def test_lengths_have_their_mean_and_their_bounds() -> None:
    generator = np.random.default_rng(SEED)
    drawn = [LengthDistribution(500, 0.8, 10**6).draw(generator) for _ in range(5000)]
    assert float(np.mean(drawn)) == pytest.approx(500, rel=0.05), f"seed {SEED}"
    cut = [LengthDistribution(2, 2.0, 4).draw(generator) for _ in range(500)]
    assert (min(cut), max(cut)) == (1, 4), f"seed {SEED}"
    assert LengthDistribution(64, 0.0, 64).draw(generator) == 64
