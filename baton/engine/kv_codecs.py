"""Opens the codecs for the blocks of a KV pool."""

from baton.core.kv_codec import KvCodecName
from baton.engine.kv_pool import KvPool
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import parse_layout
from baton.kv_codec.registry import open_codecs


def open_pool_codecs(pool: KvPool) -> dict[KvCodecName, BlockCodec]:
    """Return the codecs for the blocks of ``pool``, on the device where they are, by name. It is
    empty if their format has none."""
    block_format = parse_layout(pool.layout)
    if block_format is None or pool.device == "cpu":
        return open_codecs(block_format)
    from baton.engine.cuda.kv_codec.registry import open_gpu_codecs

    return open_gpu_codecs(block_format, pool.memory.device)
