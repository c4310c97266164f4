"""A block in DRAM and its states."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from baton.core.ids import BlockKey
from kvstore.block_encoding import RAW, BlockEncoding


class DramBlockState(StrEnum):
    """The state of a slot. FREE slots are known only to the slab allocator. A DOOMED block can't be
    looked up any more, and is freed when its last reference is released."""

    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"
    DOOMED = "doomed"


DRAM_BLOCK_TRANSITIONS: dict[DramBlockState, frozenset[DramBlockState]] = {
    DramBlockState.FREE: frozenset({DramBlockState.FILLING}),
    # verified | checksum mismatch or failed read
    DramBlockState.FILLING: frozenset({DramBlockState.SEALED, DramBlockState.FREE}),
    # evicted, purged or damaged | purged or damaged while referenced
    DramBlockState.SEALED: frozenset({DramBlockState.FREE, DramBlockState.DOOMED}),
    # the last reference was released
    DramBlockState.DOOMED: frozenset({DramBlockState.FREE}),
}


@dataclass(slots=True, eq=False)
class DramBlock:
    """A block and its slot in the arena, which has ``slot_bytes``; the block's ``size_bytes`` may
    be fewer if it is encoded. ``checksum`` (by ``algorithm``) is set when the block is sealed.
    ``depth`` is the number of blocks before it in its prefix. ``tenant`` and ``model`` are tags.
    ``stored_at`` is wall-clock time in seconds. ``last_used`` is the tick at which its last
    reference was released. ``pinned_until`` (monotonic seconds) is 0 unless it is pinned."""

    key: BlockKey
    offset: int
    size_bytes: int
    slot_bytes: int
    encoding: BlockEncoding = RAW
    depth: int = 0
    tenant: bytes = b""
    model: bytes = b""
    stored_at: float = 0.0
    state: DramBlockState = DramBlockState.FILLING
    checksum: int = 0
    algorithm: str = ""
    num_references: int = 0
    last_used: int = 0
    pinned_until: float = 0.0

    @property
    def raw_bytes(self) -> int:
        return self.encoding.raw_bytes(self.size_bytes)

    def set_state(self, state: DramBlockState) -> None:
        assert state in DRAM_BLOCK_TRANSITIONS[self.state], f"{self.state} → {state}"
        self.state = state


class BlockReferences(Protocol):
    """Counts the references to blocks. A block with references is not evicted."""

    def add_reference(self, slot: DramBlock) -> None: ...

    def release_references(self, slots: Sequence[DramBlock]) -> None:
        """Release one reference to each of the blocks, which are given in prefix order."""
        ...
