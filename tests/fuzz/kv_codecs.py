"""Fuzzes the codecs of KV blocks with random, changed and cut encodings, and blocks of any bytes.

Each buffer ends at a page that may not be accessed, so a kernel that reads or writes beyond the end
kills the process, which counts as a crash. The compiled codecs must do what those in NumPy do.
"""

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

from baton.clock import SystemClock
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.build import supported_instruction_sets
from baton.kv_codec.native_codec import open_native_codecs
from baton.kv_codec.registry import open_portable_codecs
from tests.fuzz.result import FuzzResult, Recorder
from tests.kv_blocks import CONTENTS

NAME = "kv-codecs"
CLOCK = SystemClock()

Bytes = npt.NDArray[np.uint8]

_PROTECT_NONE = 0
FORMATS = (
    BlockFormat("bfloat16", 1, 16, 2, 64),
    BlockFormat("bfloat16", 2, 4, 2, 24),
    BlockFormat("bfloat16", 1, 3, 1, 128),
    BlockFormat("float32", 2, 8, 2, 32),
    BlockFormat("float32", 1, 2, 8, 12),
)


class BoundedMemory:
    """Memory before a page that may not be accessed."""

    def __init__(self, max_bytes: int) -> None:
        self._size = -(-max_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._size + mmap.PAGESIZE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._start = int(self._bytes.ctypes.data)
        end = ctypes.c_void_p(self._start + self._size)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        assert protect(end, ctypes.c_size_t(mmap.PAGESIZE), _PROTECT_NONE) == 0

    def place(self, size_bytes: int) -> tuple[int, Bytes]:
        """Return the last ``size_bytes`` bytes before the end: their address and content."""
        first = self._size - size_bytes
        return self._start + first, self._bytes[first : self._size]


class Fuzzer:
    def __init__(self, recorder: Recorder, chance: np.random.Generator) -> None:
        self._recorder = recorder
        self._chance = chance
        size = 2 * max(each.size_bytes for each in FORMATS)
        self._source, self._target = BoundedMemory(size), BoundedMemory(size)

    def case(self) -> None:
        """Encode a block, change the result, and decode it."""
        chance = self._chance
        block_format = FORMATS[chance.integers(len(FORMATS))]
        portable = open_portable_codecs(block_format)
        name = list(portable)[chance.integers(len(portable))]
        codecs = [portable[name]]
        codecs += [
            open_native_codecs(block_format, each)[name] for each in supported_instruction_sets()
        ]
        content = list(CONTENTS)[chance.integers(len(CONTENTS))]
        block = CONTENTS[content](block_format, chance)
        self._recorder.begin(f"{name} {block_format} {content}")
        encodings = [self._encode(codec, block) for codec in codecs]
        if len(set(encodings)) > 1:
            self._recorder.crash("the encodings differ")
        self._check_intact(codecs[-1], encodings[0], block)
        broken = self._broken(encodings[0], block_format.size_bytes)
        self._recorder.begin(f"{name} {block_format} decode {broken[:500].hex()}")
        decoded = [self._decode(codec, broken, block_format.size_bytes) for codec in codecs]
        if len(set(decoded)) > 1:
            self._recorder.crash("the decoded blocks differ")

    def _check_intact(self, codec: BlockCodec, encoded: bytes, block: Bytes) -> None:
        """Decode an unchanged encoding, unless it is empty because the block stays raw."""
        decoded = self._decode(codec, encoded, len(block)) if encoded else block.tobytes()
        if decoded is None:
            self._recorder.crash("an intact encoding is invalid")
        elif not codec.name.is_lossy and decoded != block.tobytes():
            self._recorder.crash("a lossless codec has changed the block")

    def _encode(self, codec: BlockCodec, block: Bytes) -> bytes:
        source, memory = self._source.place(len(block))
        memory[:] = block
        target, encoded = self._target.place(codec.max_encoded_bytes)
        (size,) = codec.encode([source], [target])
        return encoded[:size].tobytes()

    def _decode(self, codec: BlockCodec, encoded: bytes, size_bytes: int) -> bytes | None:
        source, memory = self._source.place(len(encoded))
        memory[:] = np.frombuffer(encoded, np.uint8)
        target, block = self._target.place(size_bytes)
        (is_valid,) = codec.decode([source], [len(encoded)], [target])
        return block.tobytes() if is_valid else None

    def _broken(self, encoded: bytes, size_bytes: int) -> bytes:
        """Change some bytes or bits, cut, extend or replace an encoding; one in six stays as it
        is."""
        chance = self._chance
        kind = chance.integers(6)
        if kind == 0:
            return encoded
        if kind == 1:
            return chance.bytes(int(chance.integers(size_bytes + 100)))
        changed = np.frombuffer(encoded, np.uint8).copy()
        if kind == 2 and len(changed):
            return changed[: chance.integers(len(changed))].tobytes()
        if kind == 3:
            return encoded + chance.bytes(int(chance.integers(1, 100)))
        if kind == 4 and len(changed):
            bits = chance.integers(0, 8 * len(changed), chance.integers(1, 5))
            np.bitwise_xor.at(changed, bits // 8, (1 << bits % 8).astype(np.uint8))
            return changed.tobytes()
        # In half of the cases the header and the tables behind it, which say most.
        region = min(len(changed), 256) if chance.random() < 0.5 else len(changed)
        if region:
            places = chance.integers(0, region, chance.integers(1, 20))
            changed[places] = chance.integers(0, 256, len(places), np.uint8)
            changed[:16] = np.frombuffer(encoded, np.uint8)[:16]
        return changed.tobytes()


def fuzz(seconds: float, seed: int) -> FuzzResult:
    recorder = Recorder(NAME, seed)
    fuzzer = Fuzzer(recorder, np.random.default_rng(seed))
    until = CLOCK.monotonic() + seconds
    while CLOCK.monotonic() < until:
        try:
            fuzzer.case()
        except Exception as error:
            recorder.crash(repr(error))
    return recorder.result()
