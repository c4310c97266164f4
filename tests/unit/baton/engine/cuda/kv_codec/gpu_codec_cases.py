"""Compares the codecs of KV blocks on a GPU with those in NumPy: sizes, bytes, and which encodings
are refused.

    TRITON_INTERPRET=1 python -m tests.unit.baton.engine.cuda.kv_codec.gpu_codec_cases

runs them in Triton's interpreter, and prints a line for each check.
"""

import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.core.kv_codec import KvCodecName
from baton.engine.cuda.kv_codec.registry import open_gpu_codecs
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.registry import open_portable_codecs
from tests.kv_blocks import CONTENTS, GuardedBytes, block_bytes

SEED = 20261127
SLOT_ALIGNMENT_BYTES = 256
FILLERS = (0xA5, 0x5A)
CHANGES = 5
"""Broken encodings per codec."""

ESCAPES = (0, 1, 2, 23, 46, 47, 48, 60)
"""Numbers of escapes of a block of 128 values, of which 47 at most fit."""

Bytes = npt.NDArray[np.uint8]

SMALL_FORMATS = (
    BlockFormat("bfloat16", 1, 4, 2, 24),
    BlockFormat("bfloat16", 1, 3, 1, 64),
    BlockFormat("bfloat16", 1, 20, 1, 128),
    BlockFormat("float32", 1, 4, 4, 16),
)
"""Heads that are no power of two; rows of one group; planes of several parts and tiles, of which
the last is not full; groups that span heads. INT4 and INT2 exist for all but the first."""

LARGE_FORMATS = (
    BlockFormat("bfloat16", 36, 16, 8, 128),
    BlockFormat("float32", 4, 32, 4, 64),
    BlockFormat("bfloat16", 2, 64, 8, 256),
)


class Slots:
    """Memory of a device in which each of ``contents`` has a slot. Slots are ``slot_bytes`` apart
    or more, and all other bytes are ``filler``."""

    def __init__(
        self, contents: Sequence[bytes], slot_bytes: int, device: torch.device, filler: int
    ) -> None:
        self._stride = (slot_bytes // SLOT_ALIGNMENT_BYTES + 2) * SLOT_ALIGNMENT_BYTES
        self._before = np.full((len(contents), self._stride), filler, np.uint8)
        for slot, content in zip(self._before, contents, strict=True):
            slot[: len(content)] = np.frombuffer(content, np.uint8)
        self._memory = torch.from_numpy(self._before.copy()).to(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # codecs have a stream of their own

    @property
    def addresses(self) -> list[int]:
        first = self._memory.data_ptr()
        return [first + number * self._stride for number in range(len(self._memory))]

    def read(self, sizes_bytes: Sequence[int]) -> list[bytes]:
        """Return the first bytes of each slot."""
        after = self._memory.cpu().numpy()
        return [slot[:size].tobytes() for slot, size in zip(after, sizes_bytes, strict=True)]

    def is_intact_from(self, size_bytes: int) -> bool:
        """Return whether nothing was written beyond the first ``size_bytes`` of the slots."""
        after = self._memory.cpu().numpy()
        return bool((after[:, size_bytes:] == self._before[:, size_bytes:]).all())


def encode_on_host(codec: BlockCodec, block: Bytes) -> bytes:
    source = GuardedBytes(len(block), block)
    target = GuardedBytes(codec.max_encoded_bytes)
    (size,) = codec.encode([source.address], [target.address])
    return target.data[:size].tobytes()


def decode_on_host(codec: BlockCodec, encoding: bytes, size_bytes: int) -> bytes | None:
    source, block = GuardedBytes(len(encoding), encoding), GuardedBytes(size_bytes)
    (is_valid,) = codec.decode([source.address], [len(encoding)], [block.address])
    return block.data.tobytes() if is_valid else None


def encode_on_device(
    codec: BlockCodec, blocks: Sequence[bytes], device: torch.device
) -> list[bytes]:
    """Encode blocks by one call. Assert that nothing else is written."""
    sources = Slots(blocks, len(blocks[0]), device, FILLERS[0])
    targets = Slots([b""] * len(blocks), codec.max_encoded_bytes, device, FILLERS[0])
    sizes = codec.encode(sources.addresses, targets.addresses)
    assert sources.is_intact_from(0) and targets.is_intact_from(codec.max_encoded_bytes)
    return targets.read(sizes)


def decode_on_device(
    codec: BlockCodec, encodings: Sequence[bytes], size_bytes: int, device: torch.device
) -> list[bytes | None]:
    """Decode encodings by one call. Assert that nothing else is written, and that bytes beyond the
    encodings do not matter."""
    sizes, results = [len(each) for each in encodings], []
    for filler in FILLERS:
        sources = Slots(encodings, max(sizes), device, filler)
        blocks = Slots([b""] * len(encodings), size_bytes, device, filler)
        valid = codec.decode(sources.addresses, sizes, blocks.addresses)
        assert sources.is_intact_from(0) and blocks.is_intact_from(size_bytes)
        found = blocks.read([size_bytes] * len(encodings))
        results.append([data if ok else None for ok, data in zip(valid, found, strict=True)])
    assert results[0] == results[1]
    return results[0]


def check_blocks(
    block_format: BlockFormat, blocks: Sequence[Bytes], device: torch.device
) -> Iterator[str]:
    """Check that all codecs encode and decode blocks as those in NumPy do."""
    portable = open_portable_codecs(block_format)
    codecs = open_gpu_codecs(block_format, device)
    assert set(codecs) == set(portable)
    size = block_format.size_bytes
    for name, codec in codecs.items():
        assert codec.max_encoded_bytes == portable[name].max_encoded_bytes
        wanted = [encode_on_host(portable[name], block) for block in blocks]
        got = encode_on_device(codec, [block.tobytes() for block in blocks], device)
        assert got == wanted, f"{name} of {block_format}"
        encodings = [each for each in wanted if each]
        decoded = decode_on_device(codec, encodings, size, device) if encodings else []
        assert decoded == [decode_on_host(portable[name], each, size) for each in encodings]
        yield f"{name} of {block_format}: {len(blocks)} blocks equal"


def contents_agree(formats: Sequence[BlockFormat], device: torch.device) -> Iterator[str]:
    """Check blocks of all kinds of contents, among them NaN, infinities and denormals."""
    for block_format in formats:
        chance = np.random.default_rng(SEED)
        blocks = [make(block_format, chance) for make in CONTENTS.values()]
        yield from check_blocks(block_format, blocks, device)


def numbers_of_escapes_agree(counts: Sequence[int], device: torch.device) -> Iterator[str]:
    """Check losslessly encoded blocks of 128 values of which ``counts`` are escapes, at random
    places."""
    block_format = BlockFormat("bfloat16", 1, 1, 1, 64)
    chance, size = np.random.default_rng(SEED), 2 * block_format.plane_values
    blocks = []
    for count in counts:
        values = np.ones(size, np.float32)
        powers = 8 * chance.integers(1, 13, count) * chance.choice((-1, 1), count)
        values[chance.permutation(size)[:count]] = np.exp2(powers)
        blocks.append(block_bytes(values, block_format).tobytes())
    portable = open_portable_codecs(block_format)[KvCodecName.LOSSLESS]
    codec = open_gpu_codecs(block_format, device)[KvCodecName.LOSSLESS]
    wanted = [encode_on_host(portable, np.frombuffer(block, np.uint8)) for block in blocks]
    assert encode_on_device(codec, blocks, device) == wanted
    kept = [number for number, encoding in enumerate(wanted) if encoding]
    decoded = decode_on_device(codec, [wanted[n] for n in kept], len(blocks[0]), device)
    assert decoded == [blocks[number] for number in kept]
    yield f"lossless with 0 to {max(counts)} escapes: {len(kept)} of {len(blocks)} become smaller"


def broken_encodings_agree(
    block_format: BlockFormat, num_changes: int, device: torch.device
) -> Iterator[str]:
    """Check that random, changed, cut and extended encodings are refused or decoded as in NumPy."""
    chance, size = np.random.default_rng(SEED), block_format.size_bytes
    block = CONTENTS["widening"](block_format, chance)
    portable = open_portable_codecs(block_format)
    for name, codec in open_gpu_codecs(block_format, device).items():
        encoding = encode_on_host(portable[name], block)
        broken = [_broken(encoding, number, chance) for number in range(num_changes)]
        got = decode_on_device(codec, [*broken, encoding], size, device)
        wanted = [decode_on_host(portable[name], each, size) for each in [*broken, encoding]]
        assert got == wanted and wanted[-1] is not None, f"{name} of {block_format}"
        refused = sum(each is None for each in got)
        yield f"{name} of {block_format}: {refused} of {len(broken)} broken encodings refused"


def _broken(encoding: bytes, number: int, chance: np.random.Generator) -> bytes:
    """Change an encoding in the way that ``number`` selects."""
    kind = number % 5
    if kind == 0:
        return encoding[:16] + chance.bytes(len(encoding) - 16)
    if kind == 1:
        cut = encoding[: chance.integers(1, len(encoding))]
        return cut if chance.random() < 0.5 else encoding + chance.bytes(3)
    changed = np.frombuffer(encoding, np.uint8).copy()
    first, region = ((0, 16), (16, 64), (16, len(changed)))[kind - 2]
    places = chance.integers(first, min(region, len(changed)), 2)
    changed[places] ^= chance.integers(1, 256, 2, np.uint8)
    return changed.tobytes()


def all_checks(
    formats: Sequence[BlockFormat], num_changes: int, counts: Sequence[int], device: torch.device
) -> dict[str, Callable[[], Iterator[str]]]:
    return {
        "contents": lambda: contents_agree(formats, device),
        "escapes": lambda: numbers_of_escapes_agree(counts, device),
        "broken encodings": lambda: broken_encodings_agree(SMALL_FORMATS[1], num_changes, device),
        "broken encodings in FP32": lambda: broken_encodings_agree(
            SMALL_FORMATS[3], num_changes, device
        ),
    }


def main() -> int:
    from tests.unit.baton.engine.interpreter import compute_as_gpus_do

    compute_as_gpus_do()
    torch.set_num_threads(1)
    np.seterr(over="ignore", invalid="ignore")  # as a GPU does
    for check in all_checks(SMALL_FORMATS, CHANGES, ESCAPES, torch.device("cpu")).values():
        for line in check():
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
