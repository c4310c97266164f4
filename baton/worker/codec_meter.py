"""Measures the KV codecs of a worker while they are used; the conductor chooses between them."""

import threading
from collections.abc import Mapping, Sequence

from baton.clock import Clock
from baton.core.kv_codec import CodecSpeed, KvCodecName
from baton.kv_codec.base import BlockCodec

WINDOW_BYTES = 256 * 2**20
"""About this much of the newest KV determines the ratio and the speeds of a codec."""

START_BYTES = 16 * 2**20
"""The measurement at the worker's start counts as one of this much KV."""

FORGET_SECONDS = 300.0
"""A codec that was not used for so long is rated as at the worker's start. Otherwise, one that
seemed slow in a busy moment would never be chosen again, and so never be measured again."""


class CodecMeter:
    """Measures codecs as they encode and decode blocks of ``block_bytes``, in any thread.
    ``at_start`` are the speeds that were measured at the worker's start; only these codecs are
    measured."""

    def __init__(self, at_start: Sequence[CodecSpeed], block_bytes: int, clock: Clock) -> None:
        self._at_start = {speed.codec: speed for speed in at_start}
        self._block_bytes = block_bytes
        self._clock = clock
        self._used: dict[KvCodecName, _CodecUse] = {}
        self._lock = threading.Lock()

    def metered(self, codecs: Mapping[KvCodecName, BlockCodec]) -> dict[KvCodecName, BlockCodec]:
        """Return codecs that do the same as ``codecs`` and are measured in each call."""
        return {
            name: _MeteredCodec(codec, self, self._clock) if name in self._at_start else codec
            for name, codec in codecs.items()
        }

    def speeds(self) -> tuple[CodecSpeed, ...]:
        """Return the present speeds, in the order of ``at_start``."""
        with self._lock:
            oldest = self._clock.monotonic() - FORGET_SECONDS
            self._used = {n: use for n, use in self._used.items() if use.last_at >= oldest}
            return tuple(
                self._used[name].speed() if name in self._used else speed
                for name, speed in self._at_start.items()
            )

    def record_encoding(self, codec: KvCodecName, sizes: Sequence[int], seconds: float) -> None:
        """Record that blocks were encoded in ``seconds``. ``sizes`` are the encoded sizes; 0 for
        blocks that stay raw."""
        num_bytes = len(sizes) * self._block_bytes
        with self._lock:
            use = self._use(codec)
            use.encoded_share.add(sum(size or self._block_bytes for size in sizes), num_bytes)
            use.encode_seconds.add(seconds, num_bytes)

    def record_decoding(self, codec: KvCodecName, num_blocks: int, seconds: float) -> None:
        """Record that ``num_blocks`` blocks were decoded in ``seconds``."""
        with self._lock:
            self._use(codec).decode_seconds.add(seconds, num_blocks * self._block_bytes)

    def _use(self, codec: KvCodecName) -> "_CodecUse":
        if codec not in self._used:
            self._used[codec] = _CodecUse(self._at_start[codec])
        self._used[codec].last_at = self._clock.monotonic()
        return self._used[codec]


class _MeteredCodec:
    """Implements :class:`BlockCodec` by another codec, and records how long its calls take."""

    def __init__(self, codec: BlockCodec, meter: CodecMeter, clock: Clock) -> None:
        self.name = codec.name
        self.max_encoded_bytes = codec.max_encoded_bytes
        self._codec = codec
        self._meter = meter
        self._clock = clock

    def encode(self, blocks: Sequence[int], targets: Sequence[int]) -> list[int]:
        began = self._clock.monotonic()
        sizes = self._codec.encode(blocks, targets)
        self._meter.record_encoding(self.name, sizes, self._clock.monotonic() - began)
        return sizes

    def decode(
        self, sources: Sequence[int], sizes_bytes: Sequence[int], blocks: Sequence[int]
    ) -> list[bool]:
        began = self._clock.monotonic()
        valid = self._codec.decode(sources, sizes_bytes, blocks)
        self._meter.record_decoding(self.name, len(blocks), self._clock.monotonic() - began)
        return valid


class _CodecUse:
    """The measurements of a codec that is used, per byte of the blocks in the pool; ``last_at`` is
    when it was used last, in monotonic seconds."""

    def __init__(self, at_start: CodecSpeed) -> None:
        self._codec = at_start.codec
        self.encoded_share = _Average(at_start.ratio)
        self.encode_seconds = _Average(1 / at_start.encode_bytes_per_second)
        self.decode_seconds = _Average(1 / at_start.decode_bytes_per_second)
        self.last_at = 0.0

    def speed(self) -> CodecSpeed:
        return CodecSpeed(
            self._codec,
            self.encoded_share.value,
            1 / self.encode_seconds.value,
            1 / self.decode_seconds.value,
        )


class _Average:
    """An average per byte, in which the newest WINDOW_BYTES count most."""

    def __init__(self, at_start: float) -> None:
        self._total = at_start * START_BYTES
        self._num_bytes = float(START_BYTES)

    @property
    def value(self) -> float:
        return self._total / self._num_bytes

    def add(self, total: float, num_bytes: int) -> None:
        """Add a measurement: ``total`` for ``num_bytes``. Nothing is learned from a call that took
        no time, by a clock that is coarse or simulated."""
        if total > 0:
            kept = WINDOW_BYTES / (WINDOW_BYTES + num_bytes)
            self._total = self._total * kept + total
            self._num_bytes = self._num_bytes * kept + num_bytes
