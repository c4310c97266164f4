"""Inspects the state of an engine, for tests."""

from baton.core.request import RequestSpec
from baton.engine.engine import Engine


def cached_tokens(engine: Engine, spec: RequestSpec) -> int:
    """Return how many of the request's tokens lie in full blocks that the pool has cached. This may
    be all tokens, although the engine always computes at least the last token."""
    keys = engine.key_hasher.make_chain(spec).keys
    return engine.count_cached_blocks(keys) * engine.key_hasher.block_tokens
