"""Tests that a request with an attention window holds, transfers and finds only the blocks that its
tokens attend to, whatever the length of its prompt."""

from dataclasses import replace

import pytest

from baton.core.attention_window import MAX_WINDOW_TOKENS, AttentionWindow
from baton.core.block_key import block_keys
from baton.core.ids import BlockId, TokenId
from baton.core.request import RequestSpec
from baton.core.task import Task
from baton.engine.block_pool import BlockPool
from baton.engine.kv_window import NO_BLOCK, KvWindow
from baton.errors import Invalid
from testkit.fakes.runner import reference_answer
from tests.engine_state import cached_tokens
from tests.unit.baton.engine.test_engine import CONFIG, Bench, migrate, spec, tokens_of, transfer_kv

WINDOW = AttentionWindow(sink_tokens=5, recent_tokens=6)
"""In blocks of 4 tokens, the first two are kept for the sinks."""

SHORT_CHUNKS = replace(CONFIG, chunk_tokens=4, max_model_tokens=400)
LONG = tuple(TokenId(token % 200) for token in range(300))
"""A prompt of 75 blocks."""

MOST_BLOCKS = 2 + 4
"""Two blocks with sinks; and the 5 tokens before a chunk of 4 tokens, and these, are in at most 4
blocks."""


def windowed(name: str, token_ids: tuple[TokenId, ...] = LONG, max_tokens: int = 5) -> RequestSpec:
    return replace(spec(name, token_ids, max_tokens=max_tokens), attention_window=WINDOW)


def test_numbers_out_of_range() -> None:
    assert AttentionWindow(0, 1).is_valid
    assert AttentionWindow(MAX_WINDOW_TOKENS, MAX_WINDOW_TOKENS).is_valid
    for wrong in ((-1, 1), (0, 0), (MAX_WINDOW_TOKENS + 1, 1), (0, MAX_WINDOW_TOKENS + 1)):
        assert not AttentionWindow(*wrong).is_valid


def test_blocks_with_sinks_are_read_by_all_later_tokens() -> None:
    window = KvWindow(4, 6, sink_tokens=5)
    assert window.num_sink_spans == 2
    assert window.first_span(300) == 73
    assert window.read_indexes(range(75), 73) == [0, 1, 73, 74]
    assert window.read_indexes(range(1, 4), 3) == [1, 3]
    assert [window.num_read(spans, 73) for spans in (1, 2, 3, 73, 75)] == [1, 2, 2, 2, 4]
    assert [window.num_read(spans, 1) for spans in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert [window.num_dropped(first) for first in (0, 2, 3, 73)] == [0, 0, 1, 71]
    assert [window.first_span_after(dropped) for dropped in (0, 1, 71)] == [0, 3, 73]


def test_a_prompt_longer_than_the_pool_gets_the_reference_answer() -> None:
    bench = Bench(num_blocks=MOST_BLOCKS, config=SHORT_CHUNKS)
    request = windowed("a", max_tokens=50)
    bench.engine.add(request, Task.PREFILL_AND_DECODE)
    outputs = bench.run()
    assert tokens_of(outputs, "a") == reference_answer(request)[0]
    other = replace(request, attention_window=AttentionWindow(4, 6))
    assert reference_answer(other)[0] != reference_answer(request)[0]


def test_without_the_window_the_same_prompt_is_refused() -> None:
    bench = Bench(num_blocks=MOST_BLOCKS, config=SHORT_CHUNKS)
    with pytest.raises(Invalid, match="needs 76 KV blocks, but the worker has only 6"):
        bench.engine.add(spec("a", LONG), Task.PREFILL_AND_DECODE)
    with pytest.raises(Invalid, match="needs 6 KV blocks, but the worker has only 5"):
        small = Bench(num_blocks=MOST_BLOCKS - 1, config=SHORT_CHUNKS)
        small.engine.add(windowed("a"), Task.PREFILL_AND_DECODE)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(SHORT_CHUNKS, window_tokens=6), "layers of the model have sliding windows"),
        (replace(SHORT_CHUNKS, supports_attention_window=False), "engine does not support it"),
    ],
)
def test_refused_where_it_is_not_possible(config: object, message: str) -> None:
    bench = Bench(config=config)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=message):
        bench.engine.add(windowed("a"), Task.PREFILL_AND_DECODE)
    with pytest.raises(Invalid, match=message):
        bench.engine.reserve_blocks(windowed("a"))


def test_requests_find_only_blocks_computed_with_their_window() -> None:
    bench = Bench(num_blocks=120, config=SHORT_CHUNKS)
    bench.engine.add(windowed("a", max_tokens=1), Task.PREFILL_AND_DECODE)
    bench.run()
    assert cached_tokens(bench.engine, windowed("b")) == 300
    assert cached_tokens(bench.engine, spec("b", LONG)) == 0
    other = replace(windowed("b"), attention_window=AttentionWindow(5, 7))
    assert cached_tokens(bench.engine, other) == 0
    again = windowed("b", (*LONG, TokenId(7)), max_tokens=3)
    bench.engine.add(again, Task.PREFILL_AND_DECODE)
    outputs = bench.run()
    assert outputs[0].cached_tokens == 300
    assert tokens_of(outputs, "b") == reference_answer(again)[0]


def test_a_cached_prefix_needs_the_blocks_of_sinks_and_window_only() -> None:
    pool, window = BlockPool(9), KvWindow(4, 6, sink_tokens=5)
    keys = block_keys(Bench().engine.key_root(b""), LONG[:28], 4)
    blocks = pool.allocate(7)
    for index in (0, 1, 3, 4, 6):
        pool.seal(blocks[index], keys[index])
    # After 20 tokens, the next one reads positions 15 to 20: blocks 3 and 4.
    expected = [blocks[0], blocks[1], NO_BLOCK, blocks[3], blocks[4]]
    assert pool.find_cached(keys, window=window) == expected
    assert pool.count_cached(keys, window=window) == 5
    assert pool.count_cached(keys) == 2, "without a window, all blocks are needed"
    no_sink = BlockPool(9)
    found = no_sink.allocate(7)
    for index in (0, 2, 3, 4):
        no_sink.seal(found[index], keys[index])
    assert no_sink.count_cached(keys, window=window) == 1, "the second block has a sink token"


def test_blocks_are_published_before_they_are_dropped() -> None:
    """A prompt without a window publishes its blocks once it is computed."""
    bench = Bench(
        num_blocks=100, config=replace(SHORT_CHUNKS, chunk_tokens=20, max_batched_tokens=20)
    )
    published: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
    for request in (windowed("a"), spec("b", LONG)):
        bench.engine.add(request, Task.PREFILL)
        while bench.engine.has_work():
            runs = bench.engine.step().sealed_runs
            found = [(run.first_new_block, len(run.keys)) for run in runs]
            published[request.request_id] += found
        bench.engine.release_export(request.request_id)
    assert published == {"a": [(0, 20), (20, 40), (40, 60), (60, 75)], "b": [(0, 75)]}


def test_only_sinks_and_window_are_transferred() -> None:
    left, right = (Bench(num_blocks=MOST_BLOCKS, config=SHORT_CHUNKS) for _ in range(2))
    request = windowed("a", max_tokens=9)
    first, reservation = transfer_kv(left, right, request)
    # The token at position 300 reads positions 0 to 4 and 295 to 300.
    assert reservation.num_cached_blocks == 0
    assert reservation.block_ids == (BlockId(0), BlockId(1), BlockId(2), BlockId(3))
    assert (first, *tokens_of(right.run(), "a")) == reference_answer(request)[0]


def test_migrated_answer_continues_with_sinks_and_window() -> None:
    left, right = (Bench(num_blocks=8, config=SHORT_CHUNKS) for _ in range(2))
    request = windowed("a", LONG[:50], max_tokens=30)
    tokens, blocks = migrate(left, right, request, 17)
    assert tokens == reference_answer(request)[0]
    assert blocks.count(NO_BLOCK) == (66 - 6 + 1) // 4 - 2
