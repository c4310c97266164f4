"""Tests the checksums that are verified after a read: any changed byte changes the checksum."""

import numpy as np
import torch
import xxhash

from baton.core.kv_transfer import CHECKSUM_WSUM, CHECKSUM_XXH3
from baton.engine.checksum import weighted_sums
from kvstore.checksum import block_checksum

SEED = 3


def test_any_changed_word_changes_the_weighted_sum() -> None:
    print(f"seed {SEED}")
    chance = np.random.default_rng(SEED)
    block = torch.from_numpy(chance.integers(256, size=512, dtype=np.uint8))
    (base,) = weighted_sums(block[None])
    for position in range(512):
        changed = block.clone()
        changed[position] ^= 1 << int(chance.integers(8))
        assert weighted_sums(changed[None]) != [base]


def test_swapped_words_change_the_weighted_sum() -> None:
    words = torch.arange(128, dtype=torch.int32)[None]
    swapped = words.clone()
    swapped[0, 5], swapped[0, 9] = words[0, 9], words[0, 5]
    assert weighted_sums(words) != weighted_sums(swapped)


def test_weighted_sums_equal_a_plain_computation() -> None:
    golden = 0x9E3779B97F4A7C15
    words = [1, -2, 3]
    expected = sum(word * (2 * n + 1) * golden for n, word in enumerate(words)) % 2**64
    assert weighted_sums(torch.tensor([words], dtype=torch.int32)) == [expected]


def test_xxh3_gives_the_published_digest() -> None:
    """The expected value is the XXH3-64 digest of the empty string with seed 0, as the reference
    implementation prints it."""
    assert xxhash.xxh3_64_intdigest(b"") == 0x2D06800538D394C2


def test_store_nodes_compute_the_same_checksums() -> None:
    data = np.random.default_rng(SEED).integers(256, size=4096, dtype=np.uint8)
    (expected,) = weighted_sums(torch.from_numpy(data)[None])
    assert block_checksum(CHECKSUM_WSUM, data.data) == expected
    padded = np.append(data[:-3], np.zeros(3, dtype=np.uint8))
    (expected,) = weighted_sums(torch.from_numpy(padded)[None])
    assert block_checksum(CHECKSUM_WSUM, data[:-3].data) == expected
    assert block_checksum(CHECKSUM_XXH3, b"") == 0x2D06800538D394C2
    assert block_checksum("another", data.data) is None
