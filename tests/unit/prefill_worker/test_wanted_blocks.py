"""Tests which blocks of a stored prefix are fetched, and which cached ones are kept for it."""

from baton.core.ids import BlockKey
from baton.engine.config import EngineConfig
from prefill_worker.wanted_blocks import WantedBlocks

PLAIN = EngineConfig(block_tokens=4, max_model_tokens=64)
WINDOWED = EngineConfig(block_tokens=4, max_model_tokens=64, window_tokens=6)
GROUPED = EngineConfig(
    block_tokens=4, max_model_tokens=64, window_tokens=6, num_full_groups=1, num_windowed_groups=1
)
KEYS = [BlockKey(bytes([n])) for n in range(12)]


def numbers(keys: object) -> list[int]:
    return [key[0] for key in keys]  # type: ignore[attr-defined]


def test_all_blocks_that_are_not_cached_are_fetched() -> None:
    wanted = WantedBlocks.of(KEYS, 2, 5, PLAIN)
    assert (numbers(wanted.keys), numbers(wanted.preceding), wanted.end) == ([2, 3, 4], [0, 1], 5)
    shorter = wanted.first(2)
    assert (numbers(shorter.keys), shorter.end) == ([2, 3], 4)
    assert wanted.first(3) is wanted


def test_only_the_window_is_fetched() -> None:
    # The token at position 40 reads positions 35 to 40.
    wanted = WantedBlocks.of(KEYS, 3, 10, WINDOWED)
    assert (numbers(wanted.keys), numbers(wanted.preceding), wanted.end) == ([8, 9], [], 10)
    wanted = WantedBlocks.of(KEYS, 9, 10, WINDOWED)
    assert (numbers(wanted.keys), numbers(wanted.preceding)) == ([9], [8])


def test_only_the_window_is_fetched_in_groups_that_have_one() -> None:
    # The token at position 20 reads positions 15 to 20; the sixth span is stored in part.
    wanted = WantedBlocks.of(KEYS, 4, 11, GROUPED)
    assert (numbers(wanted.keys), wanted.end) == ([4, 6, 7, 8, 9], 10)
    assert numbers(wanted.preceding) == [0, 2]
    assert WantedBlocks.of(KEYS, 10, 11, GROUPED).keys == []
