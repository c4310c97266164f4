"""Tests the conductor's memory of recent traffic: popular prefixes, and which worker was sent which
blocks."""

import pytest

from baton.core.ids import BlockKey, WorkerId
from baton.placement.prefix_popularity import WINDOW_REQUESTS, PrefixPopularity, first_unpopular_key
from conductor import approx_prefix_index
from conductor.approx_prefix_index import ApproxPrefixIndex

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def keys(*numbers: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(bytes([number]) * 16) for number in numbers)


def test_prefix_popularity_of_recent_requests() -> None:
    heads = PrefixPopularity()
    for number in range(24):
        heads.record(keys(0, number + 1))
    assert heads.request_share(keys(0)[0]) == 0.5  # too few requests for an estimate
    for number in range(24, 48):
        heads.record(keys(0, number + 1))
    assert heads.request_share(keys(0)[0]) == 1.0
    assert heads.request_share(keys(3)[0]) == 0.0
    assert first_unpopular_key(keys(0, 3), heads.request_share, 2) == keys(3)[0]
    assert first_unpopular_key(keys(0), heads.request_share, 2) is None
    for _ in range(WINDOW_REQUESTS):
        heads.record(keys(99))
    assert heads.request_share(keys(0)[0]) == 0.0
    assert heads.request_share(keys(99)[0]) == 1.0


def test_placed_blocks_are_tracked_by_worker() -> None:
    placed = ApproxPrefixIndex()
    placed.record(A, keys(1, 2, 3))
    placed.record(B, keys(1, 2))
    assert placed.num_cached_blocks(A, keys(1, 2, 3, 4)) == 3
    assert placed.num_cached_blocks(B, keys(1, 2, 3)) == 2
    assert placed.num_cached_blocks(C, keys(1)) == 0
    placed.remove_worker(A)
    placed.remove_worker(C)
    assert placed.num_cached_blocks(A, keys(1, 2, 3)) == 0
    assert placed.num_cached_blocks(B, keys(1, 2)) == 2
    placed.record(A, keys(1))  # restarted
    assert placed.num_cached_blocks(A, keys(1, 2, 3)) == 1


def test_holders_are_ordered_by_their_longest_prefix() -> None:
    placed = ApproxPrefixIndex()
    chain = keys(1, 2, 3, 4)
    assert placed.workers_with_prefix(chain, 2) == []
    placed.record(A, chain[:1])
    placed.record(B, chain[:3])
    placed.record(C, chain[:3])
    assert placed.workers_with_prefix(chain, 1) == [B]
    assert placed.workers_with_prefix(chain, 2) == [B, C]
    assert placed.workers_with_prefix(chain, 9) == [B, C, A]
    placed.remove_worker(B)
    assert placed.workers_with_prefix(chain, 9) == [C, A]
    assert placed.workers_with_prefix(keys(9, 1), 9) == []


def test_placed_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = ApproxPrefixIndex()
    placed.set_capacity(3)
    placed.record(A, keys(1, 2))
    placed.record(A, keys(3, 4))
    # The end of the older prefix is forgotten.
    assert placed.num_cached_blocks(A, keys(1, 2)) == 1
    assert placed.num_cached_blocks(A, keys(2)) == 0
    assert placed.num_cached_blocks(A, keys(3, 4)) == 2
    placed.record(B, keys(1))  # used again
    placed.record(B, keys(5))
    assert placed.num_cached_blocks(A, keys(3, 4)) == 1
    assert [placed.num_cached_blocks(name, keys(1)) for name in (A, B)] == [1, 1]
    placed.set_capacity(0)
    monkeypatch.setattr(approx_prefix_index, "MAX_EVICTED_PER_CALL", 2)
    placed.record(C, keys(11, 12, 13, 14, 15))
    placed.set_capacity(4)
    for known in (6, 4, 4):  # a few per call
        placed.record(C, keys(11))
        found = [placed.num_cached_blocks(C, keys(n)) for n in (11, 12, 13, 14, 15)]
        others = [placed.num_cached_blocks(name, keys(n)) for name, n in ((A, 3), (B, 1), (B, 5))]
        assert sum(found) + sum(others) == known


def test_long_prompts_do_not_outgrow_the_bound() -> None:
    """A prompt of 65,536 blocks has 4,156 indexed keys, more than are dropped after a short one."""
    placed = ApproxPrefixIndex()
    placed.set_capacity(8192)
    sizes = []
    for prompt in range(4):
        first = prompt * 65_536
        placed.record(A, [number.to_bytes(16) for number in range(first, first + 65_536)])
        sizes.append(len(placed._incarnations_by_key))
    assert sizes == [4156, 8192, 8192, 8192]
    placed.set_capacity(5000)
    placed.record(A, [number.to_bytes(16) for number in range(7 * 65_536, 8 * 65_536)])
    assert len(placed._incarnations_by_key) == 5000  # 4,156 added, 7,348 dropped


def test_pairs_of_a_key_and_a_worker_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approx_prefix_index, "MAX_INDEXED_PAIRS", 6)
    placed = ApproxPrefixIndex()
    for worker in (A, B, C, C):
        placed.record(worker, keys(1, 2))
    assert num_pairs(placed) == 6
    assert [placed.num_cached_blocks(worker, keys(1, 2)) for worker in (A, B, C)] == [2, 2, 2]
    placed.record(A, keys(3))
    # The end of the older prefix is forgotten, with its three workers.
    assert num_pairs(placed) == 4
    assert [placed.num_cached_blocks(worker, keys(1, 2)) for worker in (A, B, C)] == [1, 1, 1]
    assert placed.num_cached_blocks(A, keys(3)) == 1


def test_conversations_are_found_behind_a_system_prompt_that_all_workers_have() -> None:
    placed = ApproxPrefixIndex()
    system = [b"system %d" % number for number in range(64)]
    workers = [WorkerId(f"worker-{number}") for number in range(128)]
    conversations = {name: [*system, *(f"{name} {n}" for n in range(80))] for name in workers}
    for name, prompt in conversations.items():
        placed.record(name, prompt)
    assert num_pairs(placed) == 128 * (64 + 5)
    for name, prompt in conversations.items():
        assert placed.num_cached_blocks(name, prompt) == 64 + 80
        assert placed.num_cached_blocks(workers[workers.index(name) - 1], prompt) == 64
        assert placed.workers_with_prefix(prompt, 1) == [name]


def num_pairs(placed: ApproxPrefixIndex) -> int:
    """Return how many pairs of a key and an incarnation the index has, after checking its own
    count."""
    found = sum(len(placed._incarnations_with(key)) for key in placed._incarnations_by_key)
    assert placed._num_pairs == found
    return found


def test_a_key_does_not_collect_the_workers_that_have_left() -> None:
    placed = ApproxPrefixIndex()
    prompt = keys(1, 2)
    placed.record(A, prompt)
    for number in range(1000):
        worker = WorkerId(f"worker-{number}")
        placed.record(worker, prompt)
        assert placed.workers_with_prefix(prompt, 9) == [A, worker]
        assert all(len(placed._incarnations_with(key)) <= 4 for key in prompt)
        assert num_pairs(placed) <= 8
        placed.remove_worker(worker)
    assert placed.num_cached_blocks(A, prompt) == 2
