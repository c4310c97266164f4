"""Tests that an engine whose model has sliding windows in all layers holds no more blocks than the
window needs, and finds cached prefixes of which only the last blocks are left."""

from dataclasses import replace

from baton.core.block_key import block_keys
from baton.core.ids import BlockId, TokenId
from baton.core.task import Task
from baton.engine.block_pool import BlockPool
from baton.engine.kv_window import NO_BLOCK, KvWindow
from testkit.fakes.runner import reference_answer
from tests.engine_state import cached_tokens
from tests.unit.baton.engine.test_engine import CONFIG, Bench, migrate, spec, tokens_of, transfer_kv

WINDOW = 6
WINDOWED = replace(CONFIG, window_tokens=WINDOW, chunk_tokens=4, max_model_tokens=400)
LONG = tuple(TokenId(token % 200) for token in range(300))
"""A prompt of 75 blocks."""

MOST_BLOCKS = 4
"""The 5 tokens before a chunk of 4 tokens, and these, are in at most 4 blocks of 4 tokens."""


def test_first_span_is_the_first_that_the_next_token_reads() -> None:
    window = KvWindow(4, WINDOW)
    # The token at position 10 reads positions 5 to 10; at position 13, positions 8 to 13.
    found = [window.first_span(n) for n in (0, 5, 9, 10, 12, 13, 16, 17)]
    assert found == [0, 0, 1, 1, 1, 2, 2, 3]
    assert KvWindow(4, 1).first_span(8) == 2, "a token that reads only itself needs no block"
    assert KvWindow(4).first_span(1000) == 0


def test_blocks_that_are_read_in_groups_of_layers() -> None:
    window = KvWindow(4, WINDOW, num_full_groups=1, num_windowed_groups=2)
    assert window.num_groups == 3
    assert window.read_indexes(range(9), 2) == [0, 3, 6, 7, 8]
    assert window.read_indexes(range(4, 9), 2) == [6, 7, 8]
    assert [window.num_read(spans, 2) for spans in (1, 2, 3, 4)] == [1, 2, 5, 8]
    assert KvWindow(4, WINDOW).read_indexes(range(4), 2) == [2, 3]
    assert KvWindow(4).read_indexes(range(4), 0) == [0, 1, 2, 3]


def test_a_prompt_holds_no_more_than_window_and_chunk() -> None:
    bench = Bench(num_blocks=MOST_BLOCKS, config=WINDOWED)
    assert WINDOWED.max_blocks_for(300) == MOST_BLOCKS
    request = spec("a", LONG, max_tokens=50)
    bench.engine.add(request, Task.PREFILL_AND_DECODE)
    assert tokens_of(bench.run(), "a") == reference_answer(request, window=WINDOW)[0]


def test_requests_that_share_a_prompt_wait_for_blocks_of_each_other() -> None:
    """A block that one request drops and another one still reads can't be allocated."""
    bench = Bench(num_blocks=2 * MOST_BLOCKS, config=WINDOWED)
    requests = [spec(name, LONG[:120], max_tokens=20, seed=n) for n, name in enumerate("abcd")]
    for request in requests:
        bench.engine.add(request, Task.PREFILL)
    outputs = []
    while len(outputs) < 4:
        for output in bench.engine.step().outputs:
            outputs.append(output)
            bench.engine.release_export(output.request_id)
        bench.engine.check_integrity()
    for request in requests:
        expected = reference_answer(request, window=WINDOW)[0]
        assert tokens_of(outputs, request.request_id) == expected[:1]


def test_a_cached_prefix_needs_only_the_blocks_of_the_last_window() -> None:
    bench = Bench(num_blocks=8, config=WINDOWED)
    bench.engine.add(spec("a", LONG, max_tokens=1), Task.PREFILL_AND_DECODE)
    bench.run()
    assert cached_tokens(bench.engine, spec("b", LONG)) == 300
    # After the first 40 tokens, later blocks were allocated in place of theirs.
    assert cached_tokens(bench.engine, spec("b", LONG[:40])) == 0
    bench.engine.add(spec("b", (*LONG, TokenId(7)), max_tokens=3), Task.PREFILL_AND_DECODE)
    outputs = bench.run()
    assert outputs[0].cached_tokens == 300
    expected = reference_answer(spec("b", (*LONG, TokenId(7)), max_tokens=3), window=WINDOW)[0]
    assert tokens_of(outputs, "b") == expected


def test_prefix_with_a_gap_within_the_window_is_not_found() -> None:
    pool = BlockPool(8, KvWindow(4, WINDOW))
    keys = block_keys(Bench().engine.key_root(b""), LONG[:24], 4)
    blocks = pool.allocate(6)
    for index in (0, 2, 3, 5):
        pool.seal(blocks[index], keys[index])
    assert pool.find_cached(keys[:1]) == [blocks[0]]
    # After 16 tokens, the next one reads positions 11 to 16: blocks 2 and 3, but not block 1.
    assert pool.find_cached(keys) == [NO_BLOCK, NO_BLOCK, blocks[2], blocks[3]]
    # After 24 tokens, blocks 4 and 5 are read, and block 4 is missing.
    assert pool.count_cached(keys) == 4
    assert pool.find_cached(keys, 3) == [blocks[0]]
    assert pool.find_cached_run(keys[2:]) == [blocks[2], blocks[3]]


def test_only_the_window_is_transferred() -> None:
    left, right = (Bench(num_blocks=6, config=WINDOWED) for _ in range(2))
    request = spec("a", LONG, max_tokens=9)
    first, reservation = transfer_kv(left, right, request)
    # The token at position 300 reads positions 295 to 300, of which 296 is the first of block 74.
    assert reservation.num_cached_blocks == 0
    assert reservation.block_ids == (BlockId(0), BlockId(1))
    expected = reference_answer(request, window=WINDOW)[0]
    assert (first, *tokens_of(right.run(), "a")) == expected


def test_migrated_answer_continues_with_the_blocks_of_its_window() -> None:
    left, right = (Bench(num_blocks=6, config=WINDOWED) for _ in range(2))
    request = spec("a", LONG[:50], max_tokens=30)
    tokens, blocks = migrate(left, right, request, 17)
    assert tokens == reference_answer(request, window=WINDOW)[0]
    assert blocks.count(NO_BLOCK) == (66 - WINDOW + 1) // 4


def test_a_missing_block_is_not_counted_as_referenced() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)  # among them the last of the pool, to which the index -1 would lead
    assert pool.count_referenced([NO_BLOCK, NO_BLOCK, blocks[0]]) == 1
