"""Checks block keys, which are shared between processes, machines and versions, against committed
test vectors. If a key changes, every stored block becomes unreachable, so the format version must
change, too."""

import pytest

from baton.core.attention_window import AttentionWindow
from baton.core.block_key import BLOCK_KEY_BYTES, KeyRoot, block_keys

ROOT = KeyRoot(bytes(range(32)), "float32", 4)

ROOT_VECTORS = [
    (ROOT, "de04fbce47b1cd389aa5695fdb0943e2"),
    (KeyRoot(bytes(range(32)), "bfloat16", 4), "b9625c296ba5df97d032fe5ae04c1169"),
    (KeyRoot(bytes(range(32)), "float32", 16), "336cf258539b1d188ef1ce191b122fee"),
    (
        KeyRoot(bytes(range(32)), "float32", 4, tenant_salt=b"tenant-a"),
        "dad6623dc61d145dc2407fcaf1b29005",
    ),
    (
        KeyRoot(bytes(range(32)), "float32", 4, adapter="tenant-a"),
        "ae884fffd109f8e3fe9dc3c0c7db4de8",
    ),
    (
        KeyRoot(bytes(range(32)), "float32", 4, lossy_codec="int4"),
        "4a871adca59f05136eeaeec2d7cae965",
    ),
    (
        KeyRoot(
            bytes(range(32)), "float32", 4, attention_window=AttentionWindow(64, 4096).key_text
        ),
        "10b6003cd83938dc384ee217f7127c4e",
    ),
]

CHAIN_VECTORS = [
    ([1, 2, 3, 4], "164e7471a31775558ee009ce3a697f8d"),
    ([5, 6, 7, 8], "4b65e0f1301f1305402517c638b925a0"),
    ([0, 65_536, 151_935, 4_294_967_295], "9d551bb7964061091047a9340909e6a5"),
]


@pytest.mark.parametrize(("root", "expected"), ROOT_VECTORS)
def test_root_vectors(root: KeyRoot, expected: str) -> None:
    assert root.key().hex() == expected


def test_chain_vectors() -> None:
    tokens = [token for block, _ in CHAIN_VECTORS for token in block]
    keys = block_keys(ROOT.key(), tokens, 4)
    assert [key.hex() for key in keys] == [expected for _, expected in CHAIN_VECTORS]


def test_partial_block_has_no_key() -> None:
    assert block_keys(ROOT.key(), [1, 2, 3], 4) == []
    assert len(block_keys(ROOT.key(), [1, 2, 3, 4, 5, 6, 7], 4)) == 1


def test_key_depends_on_all_preceding_tokens() -> None:
    one = block_keys(ROOT.key(), [1, 2, 3, 4, 5, 6, 7, 8], 4)
    other = block_keys(ROOT.key(), [1, 2, 3, 9, 5, 6, 7, 8], 4)
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_fields_of_a_root_do_not_run_into_each_other() -> None:
    assert KeyRoot(b"ab", "c", 4).key() != KeyRoot(b"a", "bc", 4).key()


def test_keys_have_the_fixed_length() -> None:
    assert len(ROOT.key()) == BLOCK_KEY_BYTES
    assert [len(key) for key in block_keys(ROOT.key(), [0], 1)] == [BLOCK_KEY_BYTES]


@pytest.mark.parametrize("token", [-1, 4_294_967_296])
def test_token_outside_uint32_is_rejected(token: int) -> None:
    with pytest.raises(OverflowError):
        block_keys(ROOT.key(), [token], 1)
