import numpy as np
import pytest

from baton.core.kv_codec import KvCodecName
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.header import HEADER_BYTES
from baton.kv_codec.lossless_layout import lossless_layout
from baton.kv_codec.portable_lossless import PortableLosslessCodec, window_firsts
from baton.kv_codec.registry import open_codecs
from tests.kv_blocks import CONTENTS, FORMATS, Bytes, GuardedBytes

SEED = 20261127
FORMAT = FORMATS[0]


def encode(codec: BlockCodec, data: Bytes) -> bytes:
    block, target = GuardedBytes(len(data), data), GuardedBytes(codec.max_encoded_bytes)
    (size,) = codec.encode([block.address], [target.address])
    assert np.array_equal(block.data, data)
    assert target.is_intact()
    assert 0 <= size <= codec.max_encoded_bytes
    return target.data[:size].tobytes()


def decode(codec: BlockCodec, encoded: bytes, size_bytes: int) -> Bytes | None:
    """Decode an encoded block that ends where its memory ends."""
    source, block = GuardedBytes(len(encoded), encoded), GuardedBytes(size_bytes)
    (is_valid,) = codec.decode([source.address], [len(encoded)], [block.address])
    assert block.is_intact()
    return block.data if is_valid else None


@pytest.mark.parametrize("block_format", FORMATS, ids=str)
@pytest.mark.parametrize("content", CONTENTS)
def test_decoded_blocks_are_those_that_were_encoded(
    block_format: BlockFormat, content: str
) -> None:
    codec = open_codecs(block_format)[KvCodecName.LOSSLESS]
    data = CONTENTS[content](block_format, np.random.default_rng(SEED))
    encoded = encode(codec, data)
    if content == "random bytes":
        assert encoded == b""
    else:
        assert 0 < len(encoded) < len(data)
        decoded = decode(codec, encoded, len(data))
        assert decoded is not None
        assert np.array_equal(decoded, data)


def test_many_blocks_are_encoded_in_one_call() -> None:
    codec = open_codecs(FORMAT)[KvCodecName.LOSSLESS]
    chance = np.random.default_rng(SEED)
    datas = [CONTENTS[name](FORMAT, chance) for name in ("normal", "random bytes", "zeros")]
    blocks = [GuardedBytes(len(data), data) for data in datas]
    targets = [GuardedBytes(codec.max_encoded_bytes) for _ in blocks]
    sizes = codec.encode([each.address for each in blocks], [each.address for each in targets])
    assert sizes == [len(encode(codec, data)) for data in datas]
    assert sizes[1] == 0
    results = [GuardedBytes(FORMAT.size_bytes) for _ in blocks]
    valid = codec.decode(
        [each.address for each in targets], sizes, [each.address for each in results]
    )
    assert valid == [True, False, True]
    assert np.array_equal(results[0].data, datas[0])
    assert np.array_equal(results[2].data, datas[2])


def test_normal_values_need_eleven_bits_and_a_few_escapes() -> None:
    codec = open_codecs(FORMAT)[KvCodecName.LOSSLESS]
    data = CONTENTS["normal"](FORMAT, np.random.default_rng(SEED))
    bits = len(encode(codec, data)) / (len(data) / 2) * 8
    assert 11 < bits < 11.4


def test_a_window_is_the_lowest_that_contains_most() -> None:
    sample = np.array([[[3, 3, 9, 10, 255]], [[255] * 5], [[1, 7, 8, 0, 0]]], np.uint8)
    assert window_firsts(sample).tolist() == [3, 249, 0]


def test_malformed_encodings_are_refused() -> None:
    codec = open_codecs(FORMAT)[KvCodecName.LOSSLESS]
    layout, size = lossless_layout(FORMAT), FORMAT.size_bytes
    encoded = encode(codec, CONTENTS["special"](FORMAT, np.random.default_rng(SEED)))
    for place in (*range(HEADER_BYTES), layout.ends, layout.firsts - 1):
        broken = bytearray(encoded)
        broken[place] ^= 0x80
        assert decode(codec, bytes(broken), size) is None
    high_window = bytearray(encoded)
    high_window[layout.firsts] = 250
    for broken_bytes in (
        bytes(high_window), b"", encoded[:HEADER_BYTES], encoded[:-1], encoded + b"\0",
        encoded[: layout.escapes], bytes(len(encoded)), bytes(size + 1),
    ):  # fmt: skip
        assert decode(codec, broken_bytes, size) is None
    assert decode(codec, encoded, size) is not None


def test_an_encoding_of_another_format_is_refused() -> None:
    other = BlockFormat("bfloat16", 2, 16, 4, 32)
    encoded = encode(
        PortableLosslessCodec(other), CONTENTS["normal"](other, np.random.default_rng(SEED))
    )
    assert other.size_bytes == FORMAT.size_bytes
    assert decode(open_codecs(FORMAT)[KvCodecName.LOSSLESS], encoded, FORMAT.size_bytes) is None


def test_formats_without_codecs() -> None:
    assert open_codecs(None) == {}
    assert open_codecs(BlockFormat("float16", 2, 16, 2, 64)) == {}
    assert open_codecs(BlockFormat("bfloat16", 2, 1, 1, 32)) == {}
    assert open_codecs(BlockFormat("bfloat16", 2, 16, 2, 65536)) == {}
    assert open_codecs(BlockFormat("bfloat16", 0, 16, 2, 64)) == {}
