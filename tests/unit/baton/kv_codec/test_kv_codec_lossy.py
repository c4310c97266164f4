import numpy as np
import pytest

from baton.core.kv_codec import KvCodecName
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.fp8_layout import MAX_CODE, fp8_layout
from baton.kv_codec.header import HEADER_BYTES
from baton.kv_codec.portable_fp8 import from_e4m3
from baton.kv_codec.portable_rotated import hadamard
from baton.kv_codec.registry import open_codecs
from baton.kv_codec.rotated_layout import MAX_VALUE, rotated_layout
from tests.kv_blocks import CONTENTS, FORMATS, Bytes, block_bytes, block_values
from tests.unit.baton.kv_codec.test_kv_codec_lossless import decode, encode

SEED = 20261127
FORMAT = BlockFormat("bfloat16", 2, 16, 2, 128)
LOSSY = (KvCodecName.FP8, KvCodecName.INT4, KvCodecName.INT2)


def normal_block(block_format: BlockFormat) -> Bytes:
    return CONTENTS["normal"](block_format, np.random.default_rng(SEED))


@pytest.mark.parametrize(
    "name, ratio, error",
    [(KvCodecName.FP8, 1.98, 0.03), (KvCodecName.INT4, 3.6, 0.1), (KvCodecName.INT2, 6.5, 0.35)],
)
def test_size_and_error(name: KvCodecName, ratio: float, error: float) -> None:
    codec, data = open_codecs(FORMAT)[name], normal_block(FORMAT)
    encoded = encode(codec, data)
    assert len(encoded) == codec.max_encoded_bytes
    assert len(data) / len(encoded) > ratio
    decoded = decode(codec, encoded, len(data))
    assert decoded is not None
    before, after = block_values(data, FORMAT), block_values(decoded, FORMAT)
    assert np.sqrt(np.mean((after - before) ** 2)) / np.std(before) < error


@pytest.mark.parametrize("name, error", [(KvCodecName.INT4, 0.13), (KvCodecName.INT2, 0.4)])
def test_channels_that_are_large_in_all_tokens_do_not_blur_the_others(
    name: KvCodecName, error: float
) -> None:
    chance = np.random.default_rng(SEED)
    values = block_values(normal_block(FORMAT), FORMAT)
    values[..., 5] += 100 + chance.standard_normal()
    codec, data = open_codecs(FORMAT)[name], block_bytes(values, FORMAT)
    decoded = decode(codec, encode(codec, data), len(data))
    assert decoded is not None
    errors = block_values(decoded, FORMAT) - block_values(data, FORMAT)
    others = np.delete(errors, 5, axis=-1)
    assert np.sqrt(np.mean((others - others.mean(axis=1, keepdims=True)) ** 2)) < error


@pytest.mark.parametrize("block_format", FORMATS, ids=str)
@pytest.mark.parametrize("content", CONTENTS)
def test_anything_can_be_encoded(block_format: BlockFormat, content: str) -> None:
    data = CONTENTS[content](block_format, np.random.default_rng(SEED))
    for name, codec in open_codecs(block_format).items():
        if name.is_lossy:
            decoded = decode(codec, encode(codec, data), len(data))
            assert decoded is not None
            values = block_values(decoded, block_format)
            if name != KvCodecName.FP8:
                assert np.abs(values).max() <= 4 * MAX_VALUE


def test_fp8_is_exact_where_e4m3_is() -> None:
    chance = np.random.default_rng(SEED)
    codes = chance.integers(0, 127, FORMAT.num_planes * FORMAT.plane_values, np.uint8)
    codes[:2] = 0x7E, 0
    values = from_e4m3(codes).reshape(FORMAT.num_planes, -1, 2, 128).copy()
    values[:, 0, :, 0] = MAX_CODE
    values[1] *= 2.0**-20
    codec, data = open_codecs(FORMAT)[KvCodecName.FP8], block_bytes(values, FORMAT)
    decoded = decode(codec, encode(codec, data), len(data))
    assert decoded is not None
    assert np.array_equal(decoded, data)


def test_fp8_rounds_to_even_and_saturates() -> None:
    values = np.zeros((FORMAT.num_planes, 16, 2, 128), np.float32)
    values[0, 0, 0, :9] = 448, 17, 19, -17, 2.0**-10, 3 * 2.0**-10, np.inf, -np.inf, np.nan
    codec = open_codecs(FORMAT)[KvCodecName.FP8]
    decoded = decode(codec, encode(codec, block_bytes(values, FORMAT)), FORMAT.size_bytes)
    assert decoded is not None
    result = block_values(decoded, FORMAT)[0, 0, 0, :9].tolist()
    assert result[:8] == [448, 16, 20, -16, 0, 2.0**-8, 448, -448]
    assert np.isnan(result[8])


def test_values_without_a_number_in_int4() -> None:
    """NaN is coded as 0, and infinities as MAX_VALUE; the others of the group become coarse."""
    values = block_values(normal_block(FORMAT), FORMAT)
    values[0, 3, 1, 7], values[1, 2, 0, 5] = np.nan, np.inf
    finite = values.copy()
    finite[0, 3, 1, 7], finite[1, 2, 0, 5] = 0, MAX_VALUE
    codec = open_codecs(FORMAT)[KvCodecName.INT4]
    assert encode(codec, block_bytes(values, FORMAT)) == encode(codec, block_bytes(finite, FORMAT))


@pytest.mark.parametrize("name", LOSSY)
def test_malformed_encodings_are_refused(name: KvCodecName) -> None:
    codec, size = open_codecs(FORMAT)[name], FORMAT.size_bytes
    encoded = encode(codec, normal_block(FORMAT))
    for place in range(HEADER_BYTES):
        broken = bytearray(encoded)
        broken[place] ^= 0x80
        assert decode(codec, bytes(broken), size) is None
    large_scale = bytearray(encoded)
    large_scale[HEADER_BYTES : HEADER_BYTES + 2] = b"\xff\x7f"
    for each in (b"", encoded[:-1], encoded + b"\0", bytes(len(encoded)), bytes(large_scale)):
        assert decode(codec, each, size) is None
    assert decode(codec, encoded, size) is not None


def test_equal_values_in_all_tokens_are_the_mean() -> None:
    values = np.broadcast_to(np.float32([1, -1] * 64), (FORMAT.num_planes, 16, 2, 128))
    codec = open_codecs(FORMAT)[KvCodecName.INT2]
    decoded = decode(codec, encode(codec, block_bytes(values, FORMAT)), FORMAT.size_bytes)
    assert decoded is not None
    assert np.abs(block_values(decoded, FORMAT) - values).max() < 0.3


def test_hadamard_transform() -> None:
    assert hadamard(np.float32([1, 2, 3, 4])).tolist() == [10, -2, -4, 0]
    values = np.random.default_rng(SEED).integers(-9, 9, (3, 64)).astype(np.float32)
    assert np.array_equal(hadamard(hadamard(values)), 64 * values)


def test_formats_without_int4() -> None:
    odd = BlockFormat("bfloat16", 1, 4, 2, 24)
    assert set(open_codecs(odd)) == {KvCodecName.LOSSLESS, KvCodecName.FP8}
    assert rotated_layout(KvCodecName.INT4, odd) is None
    assert fp8_layout(odd).encoded_bytes == 16 + 16 + odd.num_planes * odd.plane_values
