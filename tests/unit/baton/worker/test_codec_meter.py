"""Tests the measurement of codecs while they are used."""

from collections.abc import Sequence

import pytest

from baton.clock import ManualClock
from baton.core.kv_codec import CodecSpeed, KvCodecName
from baton.kv_codec.base import BlockCodec
from baton.worker.codec_meter import FORGET_SECONDS, START_BYTES, WINDOW_BYTES, CodecMeter

NONE, LOSSLESS, FP8, INT4, _ = KvCodecName
BLOCK_BYTES = 2**20
AT_START = (CodecSpeed(LOSSLESS, 0.7, 1e9, 2e9), CodecSpeed(INT4, 0.28, 1e9, 2e9))
ADDRESSES = range(16)


class SteadyCodec:
    """Encodes each block to ``size_bytes`` in ``encode_seconds``, and decodes it in
    ``decode_seconds``."""

    max_encoded_bytes = BLOCK_BYTES

    def __init__(self, name: KvCodecName, clock: ManualClock, size_bytes: int) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.encode_seconds = self.decode_seconds = 0.0
        self._clock = clock

    def encode(self, blocks: Sequence[int], targets: Sequence[int]) -> list[int]:
        self._clock.advance(self.encode_seconds * len(blocks))
        return [self.size_bytes] * len(blocks)

    def decode(
        self, sources: Sequence[int], sizes_bytes: Sequence[int], blocks: Sequence[int]
    ) -> list[bool]:
        self._clock.advance(self.decode_seconds * len(blocks))
        return [True] * len(blocks)


def metered(size_bytes: int) -> tuple[ManualClock, CodecMeter, SteadyCodec, BlockCodec]:
    """Return a clock, a meter, and a codec INT4, by itself and as the meter measures it."""
    clock = ManualClock()
    meter, codec = CodecMeter(AT_START, BLOCK_BYTES, clock), SteadyCodec(INT4, clock, size_bytes)
    return clock, meter, codec, meter.metered({INT4: codec})[INT4]


def use(codec: BlockCodec, num_bytes: int) -> None:
    """Encode and decode that much KV, 16 blocks at a time."""
    for _ in range(num_bytes // (len(ADDRESSES) * BLOCK_BYTES)):
        sizes = codec.encode(ADDRESSES, ADDRESSES)
        codec.decode(ADDRESSES, sizes, ADDRESSES)


def test_speeds_are_those_of_the_start_until_a_codec_is_used() -> None:
    _, meter, _, _ = metered(BLOCK_BYTES // 4)
    assert meter.speeds() == AT_START


def test_the_start_counts_as_one_chunk() -> None:
    _, meter, codec, measured = metered(BLOCK_BYTES // 2)
    codec.encode_seconds, codec.decode_seconds = BLOCK_BYTES / 3e9, BLOCK_BYTES / 5e9
    use(measured, START_BYTES)
    lossless, int4 = meter.speeds()
    assert lossless == AT_START[0]
    kept = WINDOW_BYTES / (WINDOW_BYTES + START_BYTES)
    assert int4.ratio == pytest.approx((0.28 * kept + 0.5) / (kept + 1))
    assert int4.encode_bytes_per_second == pytest.approx((kept + 1) / (kept / 1e9 + 1 / 3e9))
    assert int4.decode_bytes_per_second == pytest.approx((kept + 1) / (kept / 2e9 + 1 / 5e9))


def test_the_newest_use_counts_most() -> None:
    _, meter, codec, measured = metered(BLOCK_BYTES // 2)
    for size in (BLOCK_BYTES // 2, BLOCK_BYTES // 4):
        codec.size_bytes = size
        codec.encode_seconds = codec.decode_seconds = BLOCK_BYTES / 1e10
        use(measured, 6 * WINDOW_BYTES)
        int4 = meter.speeds()[1]
        assert int4.ratio == pytest.approx(size / BLOCK_BYTES, rel=0.01)
        assert int4.encode_bytes_per_second == pytest.approx(1e10, rel=0.03)


def test_blocks_that_stay_raw_count_with_their_size() -> None:
    _, meter, _, measured = metered(0)
    use(measured, 6 * WINDOW_BYTES)
    assert meter.speeds()[1].ratio == pytest.approx(1, rel=0.01)


def test_calls_that_take_no_time_say_nothing_about_speed() -> None:
    """As in simulations, whose clock stands still during a call."""
    _, meter, _, measured = metered(BLOCK_BYTES // 4)
    use(measured, START_BYTES)
    int4 = meter.speeds()[1]
    assert int4.encode_bytes_per_second == pytest.approx(1e9)
    assert int4.decode_bytes_per_second == pytest.approx(2e9)
    assert int4.ratio < AT_START[1].ratio


def test_a_codec_that_was_slow_for_a_moment_is_tried_again() -> None:
    clock, meter, codec, measured = metered(BLOCK_BYTES // 4)
    codec.encode_seconds = 1.0
    use(measured, START_BYTES)
    assert meter.speeds()[1].encode_bytes_per_second < 1e8
    clock.advance(FORGET_SECONDS - 1)
    assert meter.speeds()[1].encode_bytes_per_second < 1e8
    clock.advance(2)
    assert meter.speeds() == AT_START


def test_codecs_that_were_not_measured_at_the_start_are_left_alone() -> None:
    clock, meter, _, _ = metered(1)
    other = SteadyCodec(FP8, clock, 1)
    assert meter.metered({FP8: other}) == {FP8: other}
