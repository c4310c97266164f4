"""Block keys: a chain of hashes, the same in every process and on every machine.

    key_0 = H(the fields of KeyRoot)
    key_i = H(key_{i-1} || tokens of block i as little-endian uint32)

If a model's layers are divided into groups whose KV is kept in separate blocks, the block of the
first group has key_i, and that of group g has H'(key_i || g as little-endian uint32). H' is H with
another personalisation string.

H is BLAKE2b with a 128-bit digest and a personalisation string, which names the format's version.
Blocks with equal keys have equal tokens, and so have all blocks before them. So a key identifies a
whole prefix, and the longest prefix that is cached can be found by bisection. Test vectors:
test_block_key.py.

KV that may have passed a lossy codec has other keys than exact KV of the same tokens, so a request
that wants exact KV can't find the former. Without a lossy codec, the root has no field for it.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ids import BlockKey

BLOCK_KEY_BYTES = 16
_FRESH = hashlib.blake2b(digest_size=BLOCK_KEY_BYTES, person=b"baton.block.v1")
_FRESH_OF_GROUP = hashlib.blake2b(digest_size=BLOCK_KEY_BYTES, person=b"baton.group.v1")
_TOKEN_BYTES = array("I").itemsize
_BIG_ENDIAN = struct.pack("=H", 1) == struct.pack(">H", 1)


@dataclass(frozen=True, slots=True)
class KeyRoot:
    """Everything that must be equal, besides the tokens, for two blocks to have equal KV.

    ``kv_dtype`` also has the number of groups of layers, if there are several.
    ``adapter`` is the digest of the LoRA adapter in hex; empty for the base model. ``lossy_codec``
    is the name of the lossiest codec that the KV may have passed; empty for exact KV.
    ``attention_window`` is :attr:`baton.core.attention_window.AttentionWindow.key_text`, which no
    codec has as its name; empty if tokens attend to their whole context."""

    model_digest: bytes
    kv_dtype: str
    block_tokens: int
    adapter: str = ""
    tenant_salt: bytes = b""
    lossy_codec: str = ""
    attention_window: str = ""

    def key(self) -> BlockKey:
        """Return the key at the start of the chain. Each field is preceded by its length, so that
        no two roots have the same encoding."""
        fields = [
            self.model_digest,
            self.kv_dtype.encode(),
            str(self.block_tokens).encode(),
            self.adapter.encode(),
            self.tenant_salt,
        ]
        if self.lossy_codec:
            fields.append(self.lossy_codec.encode())
        if self.attention_window:
            fields.append(self.attention_window.encode())
        packed = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
        return BlockKey(_digest(packed))


def block_keys(root: BlockKey, tokens: Sequence[int], block_tokens: int) -> list[BlockKey]:
    """Return the keys of the full blocks of ``tokens``, in order; a partial last block has no
    key."""
    keys: list[BlockKey] = []
    key, size = root, block_tokens * _TOKEN_BYTES
    words = _packed(tokens)
    for start in range(0, len(words) - size + 1, size):
        key = BlockKey(_digest(key + words[start : start + size]))
        keys.append(key)
    return keys


def grouped_keys(keys: Sequence[BlockKey], num_groups: int) -> list[BlockKey]:
    """Return the keys of the blocks of all groups of layers: after each of ``keys``, which are
    those of the first group, the keys of the other groups."""
    if num_groups == 1:
        return list(keys)
    suffixes = [group.to_bytes(4, "little") for group in range(1, num_groups)]
    return [
        each for key in keys for each in (key, *(_group_digest(key + part) for part in suffixes))
    ]


def _group_digest(data: bytes) -> BlockKey:
    hash_ = _FRESH_OF_GROUP.copy()
    hash_.update(data)
    return BlockKey(hash_.digest())


def _packed(tokens: Sequence[int]) -> bytes:
    words = array("I", tokens)
    if _BIG_ENDIAN:
        words.byteswap()
    return words.tobytes()


def _digest(data: bytes) -> bytes:
    """Return the BLAKE2b digest of ``data``. Copying an unused hash object takes half as long as
    making a new one."""
    hash_ = _FRESH.copy()
    hash_.update(data)
    return hash_.digest()
