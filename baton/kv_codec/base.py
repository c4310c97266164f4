"""The interface of codecs of KV blocks."""

from collections.abc import Sequence
from typing import Protocol

from baton.core.kv_codec import KvCodecName


class BlockCodec(Protocol):
    """Encodes and decodes blocks of one :class:`~baton.kv_codec.block_format.BlockFormat` in the
    memory of one device. Addresses are those of this process, or of its GPU. Calls may take as long
    as reading the blocks, so they are made off the event loop; they release the GIL.

    Encoded blocks are self-contained: a header names codec and format, so that a block that was
    encoded differently is refused instead of misread. Equal blocks have equal encodings, whichever
    processor or device encodes them.
    """

    @property
    def name(self) -> KvCodecName: ...

    @property
    def max_encoded_bytes(self) -> int:
        """The space that an encoded block may need. It is at most the size of the block itself."""
        ...

    def encode(self, blocks: Sequence[int], targets: Sequence[int]) -> list[int]:
        """Encode the blocks at addresses ``blocks``, each to the address in ``targets``, which has
        space for ``max_encoded_bytes``. Return the encoded sizes in bytes; 0 means that the block
        would not become smaller, and must be sent as it is."""
        ...

    def decode(
        self, sources: Sequence[int], sizes_bytes: Sequence[int], blocks: Sequence[int]
    ) -> list[bool]:
        """Decode the encoded blocks at addresses ``sources`` into the blocks at addresses
        ``blocks``. Return for each whether it was a valid encoding in this codec and format; a
        block for which it was not has undefined content. No byte beyond ``sizes_bytes`` is read,
        and none outside of a block is written, whatever the source contains."""
        ...
