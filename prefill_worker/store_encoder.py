"""Encodes blocks for the KV store."""

from collections.abc import Sequence

from baton.core.ids import BlockId, BlockKey
from baton.core.kv_codec import KvCodecName
from baton.errors import DeadlineExceeded
from baton.worker.block_encoder import BlockEncoder, StagedBlocks


class StoreEncoder:
    """Encodes blocks in ``codec``. Exact blocks, and the first ``num_exact_blocks`` of a chain, get
    LOSSLESS instead of a lossy codec: later tokens attend most to a prompt's beginning. A block
    that would not become smaller stays raw."""

    def __init__(
        self,
        encoder: BlockEncoder,
        codec: KvCodecName = KvCodecName.NONE,
        num_exact_blocks: int = 1,
    ) -> None:
        self._encoder = encoder
        self._codec = codec
        self._num_exact_blocks = num_exact_blocks

    async def stage(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], first: int, *, exact: bool
    ) -> StagedBlocks:
        """Encode the leading blocks, as many as there is space for in the staging area, and at
        least one. They begin at index ``first`` of their chain. If there is no space for long, all
        of them stay raw. The caller releases the blocks once the store has read them."""
        codecs = [self._codec_of(first + number, exact=exact) for number in range(len(block_ids))]
        if self._encoder.codecs.isdisjoint(codecs):
            return await self._encoder.stay_raw(block_ids, keys)
        try:
            return await self._encoder.encode(block_ids, keys, codecs)
        except DeadlineExceeded:
            return await self._encoder.stay_raw(block_ids, keys)

    def _codec_of(self, index: int, *, exact: bool) -> KvCodecName:
        is_exact = exact or index < self._num_exact_blocks
        return KvCodecName.LOSSLESS if self._codec.is_lossy and is_exact else self._codec
