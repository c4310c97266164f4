"""Tests models some of whose layers have a sliding window: layers are divided into groups, and only
groups with a window drop blocks."""

from dataclasses import replace
from pathlib import Path

import pytest

from baton.checkpoints.checkpoint import ModelConfig, load_model_config
from baton.core.block_key import block_keys, grouped_keys
from baton.core.ids import BlockKey, TokenId
from baton.core.task import Task
from baton.engine.block_pool import BlockPool
from baton.engine.kv_window import NO_BLOCK, KvWindow
from baton.engine.layer_groups import LayerGroups
from baton.errors import Invalid
from testkit.fakes.runner import reference_answer
from testkit.model_zoo import make_model
from tests.engine_state import cached_tokens
from tests.unit.baton.engine.test_engine import Bench, spec, tokens_of, transfer_kv
from tests.unit.baton.engine.test_kv_window import LONG, WINDOW, WINDOWED

GROUPS = (1, 2)
CONFIG = replace(WINDOWED, num_full_groups=1, num_windowed_groups=2)
MOST_WINDOWED = 2 * 4
"""Blocks of both groups with a window that a prompt holds at a time: see test_kv_window."""


def config_with(tmp_path: Path, num_full: int, num_windowed: int) -> ModelConfig:
    make_model(tmp_path, "mistral-window", seed=1)
    config = load_model_config(tmp_path)
    windows = (None,) * num_full + (64,) * num_windowed
    traits = replace(config.traits, windows=windows)
    return replace(config, num_layers=len(windows), traits=traits)


@pytest.mark.parametrize(
    ("num_full", "num_windowed", "groups"),
    [
        (12, 12, (1, 1, 12)),  # gpt-oss-20b
        (4, 22, (1, 6, 4)),  # Gemma 3 1B
        (5, 29, (1, 6, 5)),  # Gemma 3 4B
        (8, 40, (1, 5, 8)),  # Gemma 3 12B
        (10, 52, (1, 6, 10)),  # Gemma 3 27B
        (28, 4, (7, 1, 4)),
        (0, 8, (0, 1, 8)),
        (8, 0, (1, 0, 8)),
    ],
)
def test_layers_are_divided(
    tmp_path: Path, num_full: int, num_windowed: int, groups: tuple[int, int, int]
) -> None:
    """(groups without a window, groups with a window, layers in a block)"""
    found = LayerGroups.of(config_with(tmp_path, num_full, num_windowed))
    assert (found.num_full, found.num_windowed, found.layers_per_block) == groups
    assert len(set(found.places)) == num_full + num_windowed
    for layer, (group, index) in enumerate(found.places):
        assert (group < found.num_full) == (layer < num_full)
        assert group < found.num_groups and index < found.layers_per_block
    assert found.window_tokens == (64 if num_windowed else None)


def test_layers_stay_together_if_no_window_is_shorter_than_a_context(tmp_path: Path) -> None:
    config = config_with(tmp_path, 2, 2)
    assert LayerGroups.of(replace(config, max_position_embeddings=64)) == LayerGroups.single(4)
    assert LayerGroups.of(replace(config, max_position_embeddings=65)).num_groups == 2


def test_keys_of_groups() -> None:
    keys = block_keys(BlockKey(bytes(16)), range(8), 4)
    assert grouped_keys(keys, 1) == keys
    grouped = grouped_keys(keys, 3)
    assert grouped[::3] == keys and len(set(grouped)) == 6
    assert [key.hex() for key in grouped_keys([BlockKey(bytes(16))], 2)] == [
        "00000000000000000000000000000000",
        "fef68f967fcc836693c506e0cd296030",
    ]


def test_a_prompt_holds_the_whole_context_of_one_group_only() -> None:
    """The prompt of 300 tokens has 75 blocks in each group, and the answer 12 more."""
    assert CONFIG.max_blocks_for(349) == 88 + MOST_WINDOWED
    bench = Bench(num_blocks=88 + MOST_WINDOWED, config=CONFIG)
    request = spec("a", LONG, max_tokens=50)
    bench.engine.add(request, Task.PREFILL_AND_DECODE)
    expected = reference_answer(request, window=WINDOW, groups=GROUPS)[0]
    assert tokens_of(bench.run(), "a") == expected


def test_a_request_that_could_never_hold_its_context_is_refused() -> None:
    bench = Bench(num_blocks=88 + MOST_WINDOWED - 1, config=CONFIG)
    with pytest.raises(Invalid, match="blocks"):
        bench.engine.add(spec("a", LONG, max_tokens=50), Task.PREFILL_AND_DECODE)


def test_a_cached_prefix_needs_all_of_one_group_and_the_last_window_of_the_others() -> None:
    bench = Bench(num_blocks=76 + MOST_WINDOWED, config=CONFIG)
    bench.engine.add(spec("a", LONG, max_tokens=1), Task.PREFILL_AND_DECODE)
    bench.run()
    assert cached_tokens(bench.engine, spec("b", LONG)) == 300
    assert cached_tokens(bench.engine, spec("b", LONG[:40])) == 0
    request = spec("b", (*LONG, TokenId(7)), max_tokens=3)
    bench.engine.add(request, Task.PREFILL_AND_DECODE)
    outputs = bench.run()
    assert outputs[0].cached_tokens == 300
    assert tokens_of(outputs, "b") == reference_answer(request, window=WINDOW, groups=GROUPS)[0]


def test_prefix_with_a_gap_is_found_up_to_the_gap() -> None:
    window = KvWindow(4, WINDOW, num_full_groups=1, num_windowed_groups=1)
    pool = BlockPool(12, window)
    keys = grouped_keys(block_keys(Bench().engine.key_root(b""), LONG[:24], 4), 2)
    blocks = pool.allocate(12)
    for index in (0, 2, 4, 5, 6, 7, 10, 11):  # spans 0 and 1 lack their windowed blocks, span 4 all
        pool.seal(blocks[index], keys[index])
    found = [blocks[0], NO_BLOCK, blocks[2], NO_BLOCK, *blocks[4:8]]
    assert pool.find_cached(keys) == found
    assert pool.count_cached(keys) == 8
    # After 12 tokens, the next one reads positions 7 to 12, and span 1 lacks its windowed block.
    assert pool.find_cached(keys, 6) == []


def test_only_the_window_is_transferred_in_groups_that_have_one() -> None:
    left, right = (Bench(num_blocks=77 + MOST_WINDOWED, config=CONFIG) for _ in range(2))
    request = spec("a", LONG, max_tokens=9)
    first, reservation = transfer_kv(left, right, request)
    assert reservation.num_cached_blocks == 0
    assert len(reservation.block_ids) == 75 + 2 * 2
    expected = reference_answer(request, window=WINDOW, groups=GROUPS)[0]
    assert (first, *tokens_of(right.run(), "a")) == expected


def test_a_transfer_leaves_out_what_is_cached() -> None:
    left, right = (Bench(num_blocks=2 * 75 + MOST_WINDOWED, config=CONFIG) for _ in range(2))
    for name, length in (("a", 120), ("b", 200)):
        request = spec(name, LONG[:length], max_tokens=9)
        first, reservation = transfer_kv(left, right, request)
        expected = reference_answer(request, window=WINDOW, groups=GROUPS)[0]
        assert (first, *tokens_of(right.run(), name)) == expected
    # All 30 spans of "a" are cached, but no later token reads their windowed blocks.
    assert reservation.num_cached_blocks == 30
    assert len(reservation.block_ids) == 50 + 2 * 2


def test_an_aborted_import_quarantines_only_its_own_blocks() -> None:
    bench = Bench(num_blocks=100, config=CONFIG)
    reservation = bench.engine.reserve_blocks(spec("a", LONG))
    assert reservation is not None
    assert bench.engine.abort(spec("a").request_id, quarantine=True)
    assert bench.pool().quarantined == len(reservation.block_ids) == 79
    bench.engine.check_integrity()
    bench.engine.release_quarantine(reservation.block_ids)
    assert bench.pool().free == 100
