"""The states of a block of the device pool, and the transitions between them."""

from enum import StrEnum


class BlockState(StrEnum):
    """The state of a block. A block that is REFERENCED or IDLE is called SEALED: it is full, has a
    key, and is never written again."""

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
    # last reference dropped | last reference to a duplicate dropped
    BlockState.REFERENCED: frozenset({BlockState.IDLE, BlockState.FREE}),
    # prefix hit | evict
    BlockState.IDLE: frozenset({BlockState.REFERENCED, BlockState.FREE}),
    # the transfer is known to have ended
    BlockState.QUARANTINED: frozenset({BlockState.FREE}),
}

SYMBOLS: dict[BlockState, str] = {
    BlockState.FREE: ".",
    BlockState.FILLING: "f",
    BlockState.REFERENCED: "#",
    BlockState.IDLE: "i",
    BlockState.QUARANTINED: "q",
}
"""The character by which ``BlockPool.describe`` shows a block."""
