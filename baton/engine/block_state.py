"""The states of a block of the device pool, and the moves between them."""

from enum import StrEnum


class BlockState(StrEnum):
    """SEALED is REFERENCED or IDLE: full, named by its key, never written again."""

    FREE = "free"
    FILLING = "filling"
    REFERENCED = "referenced"
    IDLE = "idle"
    QUARANTINED = "quarantined"


SEALED = frozenset({BlockState.REFERENCED, BlockState.IDLE})

BLOCK_TRANSITIONS: dict[BlockState, frozenset[BlockState]] = {
    # allocate
    BlockState.FREE: frozenset({BlockState.FILLING}),
    # seal | release before it was full | quarantine
    BlockState.FILLING: frozenset({BlockState.REFERENCED, BlockState.FREE, BlockState.QUARANTINED}),
    # last reference gone | the same, of a duplicate
    BlockState.REFERENCED: frozenset({BlockState.IDLE, BlockState.FREE}),
    # prefix hit | evict
    BlockState.IDLE: frozenset({BlockState.REFERENCED, BlockState.FREE}),
    # the transfer is known to be over
    BlockState.QUARANTINED: frozenset({BlockState.FREE}),
}

SYMBOLS: dict[BlockState, str] = {
    BlockState.FREE: ".",
    BlockState.FILLING: "f",
    BlockState.REFERENCED: "#",
    BlockState.IDLE: "i",
    BlockState.QUARANTINED: "q",
}
"""How ``BlockPool.describe`` draws a block."""
