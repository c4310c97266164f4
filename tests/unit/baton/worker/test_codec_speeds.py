"""Tests the measurement of codecs at a worker's start."""

import ctypes
from collections.abc import Sequence
from itertools import count

import pytest

from baton.core.kv_codec import CodecSpeed, KvCodecName, KvCodecs
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.registry import open_codecs
from baton.worker.codec_speeds import SAMPLE_BYTES, conductor_codecs, measure_codec_speeds

NONE, LOSSLESS, FP8, INT4, _ = KvCodecName
FORMAT = BlockFormat("bfloat16", 8, 16, 2, 64)
NUM_BLOCKS = SAMPLE_BYTES["cpu"] // FORMAT.size_bytes


@pytest.mark.parametrize(
    ("codecs", "wanted"),
    [
        (KvCodecs(), set()),
        (KvCodecs(wire=INT4), {INT4, LOSSLESS}),
        (KvCodecs(wire=LOSSLESS, disk=INT4), {LOSSLESS}),
        (KvCodecs(store=FP8), {FP8}),
        (KvCodecs(INT4, FP8, INT4), {INT4, LOSSLESS, FP8}),
    ],
)
def test_only_codecs_that_the_conductor_may_choose_are_measured(
    codecs: KvCodecs, wanted: set[KvCodecName]
) -> None:
    assert conductor_codecs(codecs) == wanted


class ManualTimer:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class SlowCodec:
    """Keeps the first quarter of each block. Encoding a block takes 1 ms, decoding 2 ms; the first
    call of each takes 10 s more. Every ``raw_every``-th block does not become smaller."""

    name = INT4
    max_encoded_bytes = FORMAT.size_bytes

    def __init__(self, timer: ManualTimer, raw_every: int = 0) -> None:
        self._timer = timer
        self._raw_every = raw_every
        self._encoded, self._decoded = count(), count()

    def encode(self, blocks: Sequence[int], targets: Sequence[int]) -> list[int]:
        self._timer.seconds += 1e-3 * len(blocks) + (10 if next(self._encoded) == 0 else 0)
        for block, target in zip(blocks, targets, strict=True):
            ctypes.memmove(target, block, FORMAT.size_bytes // 4)
        return [
            0 if self._raw_every and number % self._raw_every == 0 else FORMAT.size_bytes // 4
            for number in range(len(blocks))
        ]

    def decode(
        self, sources: Sequence[int], sizes_bytes: Sequence[int], blocks: Sequence[int]
    ) -> list[bool]:
        self._timer.seconds += 2e-3 * len(blocks) + (10 if next(self._decoded) == 0 else 0)
        for source, size, block in zip(sources, sizes_bytes, blocks, strict=True):
            ctypes.memmove(block, source, size)
        return [True] * len(blocks)


@pytest.mark.parametrize(("raw_every", "ratio"), [(0, 0.25), (2, 0.625)])
def test_speeds_count_raw_bytes_and_leave_out_the_first_call(raw_every: int, ratio: float) -> None:
    timer = ManualTimer()
    codecs = {INT4: SlowCodec(timer, raw_every)}
    [speed] = measure_codec_speeds(codecs, FORMAT, "cpu", frozenset({INT4, LOSSLESS}), timer)
    assert NUM_BLOCKS % 2 == 0
    assert (speed.codec, speed.ratio) == (INT4, ratio)
    assert speed.encode_bytes_per_second == pytest.approx(FORMAT.size_bytes / 1e-3)
    assert speed.decode_bytes_per_second == pytest.approx(FORMAT.size_bytes / 2e-3)


def test_codec_that_makes_no_block_smaller_is_left_out() -> None:
    timer = ManualTimer()
    codecs = {INT4: SlowCodec(timer, raw_every=1)}
    assert measure_codec_speeds(codecs, FORMAT, "cpu", frozenset({INT4}), timer) == ()
    assert measure_codec_speeds(codecs, None, "cpu", frozenset({INT4}), timer) == ()
    assert measure_codec_speeds(codecs, FORMAT, "cpu", frozenset({FP8}), timer) == ()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_codec_of_a_cpu_is_measured(dtype: str) -> None:
    block_format = BlockFormat(dtype, 2, 16, 2, 64)
    codecs, ticks = open_codecs(block_format), count()
    wanted = frozenset(codecs)
    speeds = measure_codec_speeds(codecs, block_format, "cpu", wanted, lambda: float(next(ticks)))
    sample = SAMPLE_BYTES["cpu"] // block_format.size_bytes * block_format.size_bytes
    assert [each.codec for each in speeds] == [name for name in KvCodecName if name in wanted]
    for each in speeds:
        assert 0 < each.ratio < 1
        assert each == CodecSpeed(each.codec, each.ratio, sample, sample)
