"""A KV pool with a staging area, over a transport whose reads end when a test lets them."""

from collections.abc import Sequence

import numpy as np
import xxhash

from baton.core.ids import BlockId, BlockKey
from baton.core.kv_codec import ENCODED_ALIGNMENT_BYTES, KvCodecName
from baton.core.kv_transfer import CHECKSUM_XXH3
from baton.transport.base import Capabilities, TransferState
from baton.transport.copying import CopyTransfer
from baton.transport.host_memory import HostMemory
from baton.worker.block_encoder import BlockEncoder
from baton.worker.block_reader import BlockReader, BlockSource
from baton.worker.kv_layout import KvLayout
from baton.worker.staging_area import StagingArea
from testkit.fakes.codecs import FakeCodec
from testkit.fakes.transport import MemoryFabric, MemoryTransport
from tests.sim.virtual_time import LoopClock

CLOCK = LoopClock()
SIZE = ENCODED_ALIGNMENT_BYTES
NUM_BLOCKS = 16
GROUP_BLOCKS = 2
IDS = [BlockId(number) for number in range(NUM_BLOCKS)]
KEYS = [BlockKey(bytes([number]) * 16) for number in range(NUM_BLOCKS)]
CODECS = {name: FakeCodec(name, SIZE) for name in KvCodecName if name is not KvCodecName.NONE}


class HeldTransport(MemoryTransport):
    """Transfers that are posted while ``holds`` is set stay PENDING, in ``held``, until
    :meth:`let_through`. While ``is_stuck`` is set, they can't be released."""

    holds = False
    is_stuck = False

    def __init__(self, fabric: MemoryFabric, owner: str) -> None:
        super().__init__(fabric, owner, 1, CLOCK)
        self.held: list[CopyTransfer] = []
        self.num_posted = 0

    def capabilities(self) -> Capabilities:
        return Capabilities(False, frozenset({"cpu"}), False, group_bytes=GROUP_BLOCKS * SIZE)

    def post(self, transfer: CopyTransfer) -> None:
        self.num_posted += 1
        if self.holds:
            self.held.append(transfer)
        else:
            super().post(transfer)

    def let_through(self, index: int = 0) -> None:
        """End the held transfer ``index``: its bytes have arrived."""
        super().post(self.held.pop(index))

    def poll(self, transfer: CopyTransfer) -> TransferState:
        return TransferState.PENDING if transfer in self.held else super().poll(transfer)

    def release(self, transfer: CopyTransfer) -> bool:
        if transfer in self.held:
            if self.is_stuck:
                return False
            self.held.remove(transfer)
        return super().release(transfer)


class StagedPool:
    """One process: NUM_BLOCKS blocks, of which the last third of each is zeros, and a staging area
    for ``staged_blocks``."""

    def __init__(self, fabric: MemoryFabric, name: str, staged_blocks: int = 16) -> None:
        self.memory = HostMemory(name, (NUM_BLOCKS + staged_blocks) * SIZE)
        self.bytes = np.frombuffer(self.memory.view, np.uint8)
        blocks = self.bytes[: NUM_BLOCKS * SIZE].reshape(NUM_BLOCKS, SIZE)
        values = np.random.default_rng(5).integers(1, 256, (NUM_BLOCKS, SIZE * 2 // 3))
        blocks[:, : SIZE * 2 // 3] = values
        self.staging = StagingArea(NUM_BLOCKS * SIZE, staged_blocks * SIZE)
        self.transport = HeldTransport(fabric, name)
        self.transport.register(self.memory.region)
        self.layout = KvLayout(
            "fake", SIZE, CHECKSUM_XXH3, self._block_checksums,
            self.memory.region.address, self._checksums,
        )  # fmt: skip

    def block(self, number: int) -> bytes:
        return self.bytes[number * SIZE : (number + 1) * SIZE].tobytes()

    def encoder(self) -> BlockEncoder:
        return BlockEncoder(self.layout, self.staging, CODECS)

    def reader(self, staging_seconds: float = 1.0) -> BlockReader:
        return BlockReader(self.layout, self.staging, CODECS, CLOCK, staging_seconds)

    def source(self, other: "StagedPool") -> BlockSource:
        """Return the memory of ``other``, to be read into this pool."""
        peer = self.transport.connect(other.transport.export())
        return BlockSource(self.transport, peer, 5.0, 0.5)  # type: ignore[arg-type]

    def check_free(self) -> None:
        """Check that the whole staging area is free, and nobody waits."""
        self.staging.check_integrity()
        assert (self.staging.used_bytes, self.staging.num_waiting) == (0, 0)

    def _block_checksums(self, block_ids: Sequence[BlockId]) -> list[int]:
        return self._checksums([(block_id * SIZE, SIZE) for block_id in block_ids])

    def _checksums(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        return [xxhash.xxh3_64_intdigest(self.bytes[at : at + n].data) for at, n in ranges]


def two_pools(staged_blocks: int = 16) -> tuple[StagedPool, StagedPool]:
    """Return a source and a reader, whose pool is empty."""
    fabric = MemoryFabric()
    source, reader = (StagedPool(fabric, name, staged_blocks) for name in ("source", "reader"))
    reader.bytes[:] = 0
    return source, reader
