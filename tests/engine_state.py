"""Questions that tests ask of an engine, and workers don't."""

from baton.core.request import RequestSpec
from baton.engine.engine import Engine


def cached_tokens(engine: Engine, spec: RequestSpec) -> int:
    """Tokens of the full blocks that the pool holds of this request. May be all of them, though at
    least the last token is always computed."""
    keys = engine.keys.chain(spec).keys
    return engine.num_cached_blocks(keys) * engine.keys.block_tokens
