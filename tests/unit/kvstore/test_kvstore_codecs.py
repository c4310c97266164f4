"""Tests a store node with encoded blocks: which of them it accepts and leases, how much room they
take, and how they are encoded for the SSD."""

from ctypes import addressof, c_char
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import CHECKSUM_WSUM, CHECKSUM_XXH3, BlockRef
from baton.core.store import RAW_ONLY, BlockFilter, PutRequest, Tier
from baton.errors import Invalid
from baton.kv_codec.block_format import parse_layout
from baton.kv_codec.registry import open_codecs
from kvstore.checksum import block_checksum
from kvstore.disk_encoder import DiskEncoder
from kvstore.slot_sizes import FIXED_SIZE_STEPS, slot_bytes_for
from kvstore.stored_codecs import OpenCodecs, StoredCodecs
from testkit.fakes.codecs import FakeCodec, open_fake_codecs
from tests.store_harness import KEYS, StoreHarness

LAYOUT = "float32[4x2x16x8x4]"
SIZE = 16 * 1024
LOSSLESS, FP8, INT4, INT2 = (KvCodecName(name) for name in ("lossless", "fp8", "int4", "int2"))
ACCEPTED = RAW_ONLY | {LOSSLESS}
FAKES: OpenCodecs = open_fake_codecs


class CodecHarness(StoreHarness):
    """A store node whose blocks have 16 KiB, ``num_zeros`` zeros at the end of each. The first slab
    has space for four raw blocks."""

    def __init__(
        self,
        folder: Path | None = None,
        disk_codec: KvCodecName = KvCodecName.NONE,
        num_zeros: int = 0,
        dram_blocks: int = 16,
        codecs: OpenCodecs = FAKES,
    ) -> None:
        opened = StoredCodecs(codecs)
        encoder = DiskEncoder(disk_codec, opened) if disk_codec is not KvCodecName.NONE else None
        super().__init__(
            dram_blocks,
            folder,
            size=SIZE,
            slab_blocks=4,
            disk_encoder=encoder,
            policy="lru",
            codecs=opened,
        )
        self.raw = []
        for number in range(len(self.bytes) // SIZE):
            self.bytes[(number + 1) * SIZE - num_zeros : (number + 1) * SIZE] = 0
            self.raw.append(self.block(number))

    def encoded(self, number: int, codec: KvCodecName) -> bytes:
        return FakeCodec(codec, SIZE).encoded(self.raw[number])

    def encoded_ref(self, number: int, codec: KvCodecName) -> BlockRef:
        """Place block ``number`` encoded in the worker's memory, and return a reference to it."""
        data = self.encoded(number, codec)
        start = number * SIZE
        self.bytes[start : start + len(data)] = list(data)
        checksum = xxhash.xxh3_64_intdigest(data)
        return BlockRef(start, len(data), checksum, KEYS[number], codec)

    def request_of(self, *blocks: BlockRef, exact: bool = False) -> PutRequest:
        return PutRequest(self.source, CHECKSUM_XXH3, blocks, layout=LAYOUT, exact=exact)

    async def store(self, *blocks: BlockRef, exact: bool = False) -> int:
        return (await self.node.put(self.request_of(*blocks, exact=exact))).num_stored

    def codecs(self) -> dict[int, tuple[Tier, KvCodecName]]:
        """Return the tier and the codec of each block, by the block's number."""
        blocks, _ = self.node.list_blocks(BlockFilter(), 0, 99)
        return {block.key[0]: (block.tier, block.codec) for block in blocks}


async def test_blocks_of_several_codecs_are_stored_and_leased() -> None:
    store = CodecHarness()
    refs = [store.ref(0), store.encoded_ref(1, INT4), store.encoded_ref(2, FP8)]
    assert await store.store(*refs) == 3
    leased = await store.lease(0, 1, 2)
    assert [(b.size_bytes, b.codec) for b in leased.blocks] == [
        (SIZE, KvCodecName.NONE),
        (SIZE // 4 + 1, INT4),
        (SIZE // 2 + 1, FP8),
    ]
    assert [block.checksum for block in leased.blocks] == [ref.checksum for ref in refs]
    expected = [store.raw[0], store.encoded(1, INT4), store.encoded(2, FP8)]
    assert await store.read(0, 1, 2) == expected
    assert store.has_integrity()


async def test_reader_gets_only_the_prefix_that_it_can_decode() -> None:
    store = CodecHarness(num_zeros=9000)
    refs = [store.ref(0), store.encoded_ref(1, LOSSLESS), store.encoded_ref(2, INT4), store.ref(3)]
    assert await store.store(*refs) == 4
    for codecs, count in ((RAW_ONLY, 1), (ACCEPTED, 2), (ACCEPTED | {INT4}, 4)):
        counted = await store.lease(0, 1, 2, 3, max_bytes=0, codecs=codecs)
        leased = await store.lease(0, 1, 2, 3, codecs=codecs)
        assert (counted.num_stored, leased.num_stored, len(leased.blocks)) == (count, count, count)
    assert (await store.lease(2, max_bytes=0, codecs=ACCEPTED)).num_stored == 0


@pytest.mark.parametrize(
    ("change", "layout", "exact", "error"),
    [
        ({"codec": INT4}, "", False, "its layout '' has no codecs"),
        ({"codec": INT4}, "float16[4x2x16x8x4]", False, "has no codecs"),
        ({"codec": INT4}, f"float32[{2**16}x2x16x8x4]", False, "has no codecs"),
        ({"codec": INT4, "size_bytes": SIZE}, LAYOUT, False, "it must have fewer than 16384"),
        ({"codec": INT4}, LAYOUT, True, "int4, which is lossy, although the put is exact"),
        ({}, "float32[4x2x16x8x8]", False, "has 16384 bytes; in layout .* it must have 32768"),
        ({"codec": INT4}, "float32[40x2x16x8x8]", False, "it must have 1 to 65536, the size of a"),
    ],
)
async def test_impossible_encodings_are_rejected(
    change: dict[str, object], layout: str, exact: bool, error: str
) -> None:
    store = CodecHarness()
    ref = replace(store.ref(0), **change)  # type: ignore[arg-type]
    if "codec" in change and "size_bytes" not in change:
        ref = replace(ref, size_bytes=100)
    request = PutRequest(store.source, CHECKSUM_XXH3, (ref,), layout=layout, exact=exact)
    with pytest.raises(Invalid, match=error):
        await store.node.put(request)
    assert store.node.stats().num_blocks == 0


async def test_encoded_blocks_take_less_room() -> None:
    store = CodecHarness()
    refs = [store.encoded_ref(number, INT4) for number in range(16)]
    assert await store.store(*refs) == 16
    stats = store.node.stats()
    slot = slot_bytes_for(SIZE // 4 + 1, SIZE, FIXED_SIZE_STEPS)
    assert slot == SIZE // 4 + 64
    assert (stats.raw_bytes, stats.used_bytes) == (16 * SIZE, 16 * slot)
    assert stats.used_bytes < stats.raw_bytes / 3.7
    blocks, _ = store.node.list_blocks(BlockFilter(), 0, 1)
    assert (blocks[0].size_bytes, blocks[0].raw_bytes) == (SIZE // 4 + 1, SIZE)
    await store.node.purge(BlockFilter())
    assert (store.node.stats().raw_bytes, store.node.stats().violation) == (0, "")


async def test_a_few_blocks_of_another_size_are_not_evicted_for_their_size_alone() -> None:
    """Each slot size keeps only its own share of the arena free."""
    store = CodecHarness(num_zeros=9000, dram_blocks=32)
    assert await store.store(*[store.ref(number) for number in range(12)]) == 12
    assert await store.store(store.encoded_ref(12, LOSSLESS), store.encoded_ref(13, INT4)) == 2
    assert len(store.dram.slot_sizes()) == 3
    assert not any(store.node.demoter._is_low(size) for size in store.dram.slot_sizes())


async def test_blocks_are_encoded_for_the_disk_and_stay_so_when_promoted(tmp_path: Path) -> None:
    store = CodecHarness(tmp_path, LOSSLESS, num_zeros=9000)
    assert await store.store(store.ref(0), store.ref(1)) == 2
    assert await store.node.demoter.demote_all() == 2
    stats = store.node.stats()
    assert (stats.encoded_demotions, stats.disk_raw_bytes) == (2, 2 * SIZE)
    assert stats.disk_used_bytes == 2 * 8192
    assert store.codecs() == dict.fromkeys((0, 1), (Tier.DRAM, KvCodecName.NONE))
    assert store.disk is not None
    store.disk.close()
    again = CodecHarness(tmp_path, LOSSLESS, num_zeros=9000)
    assert again.codecs() == {0: (Tier.DISK, LOSSLESS), 1: (Tier.DISK, LOSSLESS)}
    assert (await again.lease(0, codecs=RAW_ONLY)).num_stored == 0
    leased = await again.lease(0, 1)
    assert [block.codec for block in leased.blocks] == [LOSSLESS, LOSSLESS]
    data = await again.read(0, 1)
    assert [FakeCodec(LOSSLESS, SIZE).decoded(each) for each in data] == store.raw[:2]
    assert again.codecs() == {0: (Tier.DRAM, LOSSLESS), 1: (Tier.DRAM, LOSSLESS)}
    assert again.has_integrity()


async def test_blocks_that_would_not_become_smaller_stay_raw(tmp_path: Path) -> None:
    store = CodecHarness(tmp_path, LOSSLESS)
    await store.store(store.ref(0))
    await store.node.demoter.demote_all()
    assert (store.node.stats().demotions, store.node.stats().encoded_demotions) == (1, 0)
    assert store.node.stats().disk_used_bytes == SIZE


async def test_exact_blocks_get_no_lossy_codec(tmp_path: Path) -> None:
    store = CodecHarness(tmp_path, INT4, num_zeros=9000)
    await store.store(store.ref(0), exact=True)
    await store.store(store.ref(1))
    await store.store(store.encoded_ref(2, LOSSLESS))
    await store.store(store.encoded_ref(3, LOSSLESS), exact=True)
    await store.store(store.encoded_ref(4, FP8))
    await store.store(store.encoded_ref(5, INT2))
    assert await store.node.demoter.demote_all() == 6
    assert store.disk is not None
    on_disk = {block.key[0]: block.record.encoding.codec for block in store.disk.blocks()}
    assert on_disk == {0: LOSSLESS, 1: INT4, 2: INT4, 3: LOSSLESS, 4: FP8, 5: INT2}
    assert store.node.stats().encoded_demotions == 3


async def test_lossless_block_is_decoded_before_it_is_encoded_in_a_smaller_codec(
    tmp_path: Path,
) -> None:
    store = CodecHarness(tmp_path, INT4, num_zeros=9000)
    await store.store(store.encoded_ref(0, LOSSLESS))
    await store.node.demoter.demote_all()
    store.node._tiers.evict(store.dram.sealed())
    assert await store.read(0) == [store.encoded(0, INT4)]


async def test_blocks_damaged_in_dram_are_dropped_instead_of_encoded(tmp_path: Path) -> None:
    store = CodecHarness(tmp_path, LOSSLESS, num_zeros=9000)
    await store.store(store.ref(0), store.ref(1))
    store.flip_bit(5)
    assert await store.node.demoter.demote_all() == 1
    assert store.codecs() == {1: (Tier.DRAM, KvCodecName.NONE)}
    assert store.node.stats().checksum_failures == 1
    assert store.has_integrity()


async def test_invalid_encodings_are_dropped(tmp_path: Path) -> None:
    """The worker's checksum is right, but the bytes are no encoding."""
    store = CodecHarness(tmp_path, INT4)
    checksum = xxhash.xxh3_64_intdigest(store.block(0)[:100])
    await store.store(BlockRef(0, 100, checksum, KEYS[0], LOSSLESS))
    assert await store.node.demoter.demote_all() == 0
    assert (store.codecs(), store.node.stats().checksum_failures) == ({}, 1)


async def test_reported_block_that_cannot_be_decoded_is_dropped(tmp_path: Path) -> None:
    """Otherwise, each reader would fetch it again in vain. Its copy on the disk has the same
    bytes."""
    store = CodecHarness(tmp_path)
    checksum = xxhash.xxh3_64_intdigest(store.block(0)[:100])
    invalid = BlockRef(0, 100, checksum, KEYS[0], LOSSLESS)
    assert await store.store(invalid, store.encoded_ref(1, INT4), store.ref(2)) == 3
    assert await store.node.demoter.demote_all() == 3
    assert await store.node.report_damaged(KEYS[:3]) == 1
    assert store.codecs() == {1: (Tier.DRAM, INT4), 2: (Tier.DRAM, KvCodecName.NONE)}
    assert store.disk is not None and KEYS[0] not in store.disk
    assert (await store.lease(0)).num_stored == 0
    assert store.has_integrity()


async def test_copy_on_the_disk_survives_damage_in_dram(tmp_path: Path) -> None:
    store = CodecHarness(tmp_path)
    await store.store(store.encoded_ref(0, INT4))
    await store.node.demoter.demote_all()
    store.flip_bit(0)  # the codec's tag: neither the checksum nor the encoding is right
    assert await store.node.report_damaged(KEYS[:1]) == 1
    assert store.codecs() == {0: (Tier.DISK, INT4)}
    assert await store.read(0) == [store.encoded(0, INT4)]


async def test_checksum_of_the_worker_is_kept_for_encoded_blocks(tmp_path: Path) -> None:
    """A worker with a GPU verifies only its own kind of checksum."""
    store = CodecHarness(tmp_path, LOSSLESS, num_zeros=9001)
    checksum = block_checksum(CHECKSUM_WSUM, store.block(0))
    assert checksum is not None
    ref = replace(store.ref(0), checksum=checksum)
    await store.node.put(PutRequest(store.source, CHECKSUM_WSUM, (ref,), layout=LAYOUT))
    await store.node.demoter.demote_all()
    store.node._tiers.evict(store.dram.sealed())
    leased = await store.lease(0)
    encoded = store.encoded(0, LOSSLESS)
    assert len(encoded) % 4 == 0
    assert leased.checksum_algorithm == CHECKSUM_WSUM
    assert leased.blocks[0].checksum == block_checksum(CHECKSUM_WSUM, encoded)


async def test_real_codec_gives_the_same_kv(tmp_path: Path) -> None:
    store = CodecHarness(tmp_path, LOSSLESS, codecs=open_codecs)
    values = store.bytes.view("<f4")
    values[:] = [number / 1000 for number in range(len(values))]
    expected = store.block(3)
    await store.store(store.ref(3))
    await store.node.demoter.demote_all()
    store.node._tiers.evict(store.dram.sealed())
    (encoded,) = await store.read(3)
    assert store.codecs() == {3: (Tier.DRAM, LOSSLESS)} and len(encoded) < SIZE
    source, block = bytearray(encoded), bytearray(SIZE)
    codec = open_codecs(parse_layout(LAYOUT))[LOSSLESS]
    addresses = [addressof(c_char.from_buffer(data)) for data in (source, block)]
    assert codec.decode(addresses[:1], [len(source)], addresses[1:]) == [True]
    assert bytes(block) == expected


@pytest.mark.parametrize("raw", [4096, SIZE, 1_000_000, 2**21])
def test_slots_are_hardly_larger_than_blocks_and_have_few_sizes(raw: int) -> None:
    sizes = {slot_bytes_for(size, raw) for size in range(raw // 2 + 1, raw + 1, 7)}
    assert len(sizes) <= 17
    for size in range(raw // 8, raw + 1, 13):
        slot = slot_bytes_for(size, raw)
        assert size <= slot <= min(size + size / 16 + 64, raw)
        fine = slot_bytes_for(size, raw, FIXED_SIZE_STEPS)
        assert size <= fine <= min(size + size / 128 + 64, raw)
    assert slot_bytes_for(raw, raw) == raw
