"""Tests how much prefill plain LRU and the store's default eviction policy save on the conversation
trace."""

import pytest

from benchmarks.eviction import TRACE, TracePrompt, plain_lru, read_trace, replay
from kvstore.eviction import new_eviction_policy

pytestmark = pytest.mark.skipif(not TRACE.exists(), reason=f"the trace is not at {TRACE}")


@pytest.fixture(scope="module")
def prompts() -> list[TracePrompt]:
    return read_trace(TRACE)


@pytest.mark.parametrize(
    ("capacity", "share"),
    [(1_000, 0.0445), (10_000, 0.2116), (30_000, 0.3257), (50_000, 0.3546), (None, 0.3664)],
)
def test_plain_lru_reaches_the_published_hit_rates(
    prompts: list[TracePrompt], capacity: int | None, share: float
) -> None:
    num_blocks = sum(len(prompt.keys) for prompt in prompts)
    assert round(plain_lru(prompts, capacity).blocks / num_blocks, 4) == share


@pytest.mark.parametrize("capacity", [1_000, 10_000, 30_000])
def test_the_default_saves_more_prefill_than_plain_lru(
    prompts: list[TracePrompt], capacity: int
) -> None:
    ours = replay(prompts, new_eviction_policy("baton"), capacity)
    assert ours.tokens > plain_lru(prompts, capacity).tokens
