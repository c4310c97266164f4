"""Inspects the state of an engine, for tests."""

from baton.core.attention_window import AttentionWindow
from baton.core.ids import BlockId
from baton.core.request import RequestSpec
from baton.engine.engine import Engine, PrefillProgress


def cached_tokens(engine: Engine, spec: RequestSpec) -> int:
    """Return how many of the request's tokens lie in full blocks that the pool has cached. This may
    be all tokens, although the engine always computes at least the last token."""
    keys = engine.key_hasher.make_chain(spec).keys
    return engine.count_cached_tokens(keys, spec.attention_window)


def exported_blocks(
    engine: Engine, progress: PrefillProgress, attention_window: AttentionWindow | None = None
) -> list[BlockId]:
    """Return the blocks of a computed prompt that another engine needs, in the order in which
    :meth:`Engine.reserve_blocks` returns those that they are copied to."""
    window, table = engine.config.window_of(attention_window), progress.block_ids
    first_span = window.first_span(progress.num_computed_tokens)
    return [table[index] for index in window.read_indexes(range(len(table)), first_span)]
