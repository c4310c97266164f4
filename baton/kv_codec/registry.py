"""Opens the codecs that exist for a block format on a device."""

from baton.core.kv_codec import KvCodecName
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.header import has_codecs
from baton.kv_codec.portable_lossless import PortableLosslessCodec


def open_codecs(
    block_format: BlockFormat | None, device: str = "cpu"
) -> dict[KvCodecName, BlockCodec]:
    """Return the codecs for blocks of ``block_format`` in the memory of ``device``, by name. It is
    empty if there is no format, or none that can be encoded, and for devices other than "cpu"."""
    if block_format is None or device != "cpu" or not has_codecs(block_format):
        return {}
    return {KvCodecName.LOSSLESS: PortableLosslessCodec(block_format)}
