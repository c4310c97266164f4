"""Tests that block tables that are kept between steps equal freshly built ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.attention.base import pack_batch
from baton.engine.attention.block_tables import BlockTableCache
from baton.engine.plan import Row

BLOCK_TOKENS = 4
CPU = torch.device("cpu")
SEED = 20261121


def row(name: str, start: int, num_tokens: int, block_ids: tuple[int, ...]) -> Row:
    return Row(
        RequestId(name),
        (TokenId(1),) * num_tokens,
        start,
        tuple(map(BlockId, block_ids)),
        True,
        SamplingParams(max_tokens=1),
    )


def test_block_tables_are_padded_and_truncated_to_the_used_blocks() -> None:
    rows = [row("a", 9, 1, (7, 3, 5)), row("b", 0, 3, (4, 9, 8))]
    batch = pack_batch(rows, BLOCK_TOKENS, CPU)
    assert batch.block_tables.tolist() == [[[7, 3, 5], [4, 0, 0]]]
    assert (batch.starts, batch.context_lengths, batch.offsets) == ((9, 0), (10, 3), (0, 1, 4))
    assert batch.num_decodes == 1
    assert batch.positions.tolist() == [9, 0, 1, 2]
    assert batch.slots.tolist() == [[5 * 4 + 1, 16, 17, 18]]


def test_batch_of_decodes_only() -> None:
    batch = pack_batch([row("a", 3, 1, (2,)), row("b", 4, 1, (6, 1))], BLOCK_TOKENS, CPU)
    assert batch.num_decodes == 2
    assert batch.positions.tolist() == [3, 4]
    assert batch.slots.tolist() == [[11, 4]]


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_each_group_of_layers_has_its_own_blocks(num_tokens: int) -> None:
    """The second block of the second row is not in the table any more."""
    rows = [row("a", 3, num_tokens, (2, 12, 5, 15)), row("b", 4, num_tokens, (6, -1, 7, 17))]
    batch = pack_batch(rows, BLOCK_TOKENS, CPU, num_groups=2)
    assert batch.slots.is_contiguous() and batch.block_tables.is_contiguous()
    num_spans = [1 + (3 + num_tokens > 4), 2]
    first, second = [2, 5][: num_spans[0]], [12, 15][: num_spans[0]]
    padding = [0] * (2 - num_spans[0])
    assert batch.block_tables.tolist() == [
        [[*first, *padding], [6, 7]],
        [[*second, *padding], [0, 17]],
    ]
    assert batch.slots[:, 0].tolist() == [2 * 4 + 3, 12 * 4 + 3]
    assert batch.slots[:, -1].tolist() == [7 * 4 + num_tokens - 1, 17 * 4 + num_tokens - 1]


def test_kept_block_tables_equal_fresh_ones_over_many_steps() -> None:
    """Each step has a random subset of six requests, whose contexts grow. In some steps, two rows
    have the same block table; now and then, a request gets new blocks, as after a preemption."""
    print(f"seed {SEED}")
    chance, tables = np.random.default_rng(SEED), BlockTableCache()
    rows = [row(str(n), int(chance.integers(40)), 1, ()) for n in range(6)]
    for _ in range(300):
        rows = [_advanced(each, chance) for each in rows]
        chosen = [rows[n] for n in chance.permutation(6)[: int(chance.integers(1, 7))]]
        if chance.random() < 0.3:
            chosen.append(replace(chosen[0], request_id=RequestId("twin")))
        kept = pack_batch(chosen, BLOCK_TOKENS, CPU, tables)
        fresh = pack_batch(chosen, BLOCK_TOKENS, CPU)
        assert kept.block_tables.tolist() == fresh.block_tables.tolist()
        assert kept.slots.tolist() == fresh.slots.tolist()


def _advanced(one: Row, chance: np.random.Generator) -> Row:
    """Return the request's row in the next step, one token further, with another block if it needs
    one. With a chance of 5 %, the row gets another position and other blocks, like a request that
    was preempted."""
    start, block_ids = one.start + 1, one.block_ids
    if chance.random() < 0.05:
        start, block_ids = int(chance.integers(40)), ()
    lacking = start // BLOCK_TOKENS + 1 - len(block_ids)
    if lacking > 0:
        block_ids += tuple(BlockId(int(block)) for block in chance.integers(1, 99, lacking))
    return replace(one, start=start, block_ids=block_ids)
