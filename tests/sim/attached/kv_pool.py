"""The KV blocks of a simulated server: what they contain, and which of them are cached."""

from collections.abc import Sequence

from testkit.fakes.runner import SLOT_BYTES, compute_slots

BLOCK_TOKENS = 4
BLOCK_BYTES = BLOCK_TOKENS * SLOT_BYTES
FOREIGN = b"\xaa" * BLOCK_BYTES
"""What requests of others leave in a block."""

Key = tuple[str, tuple[int, ...]]
"""What a cached block is found by: the salt, and all tokens up to the block's end."""


class KvPool:
    """Blocks that nobody uses keep their content, and their place in the cache, until they are
    allocated again: the longest unused first."""

    def __init__(self, num_blocks: int) -> None:
        self._content = [FOREIGN] * num_blocks
        self._num_users = [0] * num_blocks
        self._free = dict.fromkeys(range(num_blocks))
        self._cached: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}

    @property
    def num_used(self) -> int:
        return len(self._content) - len(self._free)

    def allocate(
        self, prompt: tuple[int, ...], salt: str, num_tokens: int
    ) -> tuple[list[int], int] | None:
        """Return blocks for ``num_tokens`` tokens and how many tokens of the prompt the first of
        them have cached, at most all but one; None if there are too few free blocks."""
        blocks: list[int] = []
        for end in range(BLOCK_TOKENS, len(prompt), BLOCK_TOKENS):
            block = self._cached.get((salt, prompt[:end]))
            if block is None:
                break
            blocks.append(block)
        num_cached = len(blocks)
        fresh = [block for block in self._free if block not in blocks]
        num_fresh = -(-num_tokens // BLOCK_TOKENS) - num_cached
        if len(fresh) < num_fresh:
            return None
        for block in fresh[:num_fresh]:
            self._forget(block)
            blocks.append(block)
        for block in blocks:
            self._free.pop(block, None)
            self._num_users[block] += 1
        return blocks, num_cached * BLOCK_TOKENS

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._num_users[block] -= 1
            if not self._num_users[block]:
                self._free[block] = None

    def take_free(self) -> list[int]:
        """Let a request of others use, and write to, all free blocks."""
        blocks = list(self._free)
        for block in blocks:
            self._forget(block)
            self._num_users[block] += 1
        self._free.clear()
        self.spoil(blocks)
        return blocks

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._cached[key]

    # -- content -----------------------------------------------------------------------------

    def read(self, blocks: Sequence[int], num_tokens: int) -> bytes:
        return b"".join(self._content[block] for block in blocks)[: num_tokens * SLOT_BYTES]

    def copy(self, blocks: Sequence[int], source: "KvPool", source_blocks: Sequence[int]) -> None:
        for block, other in zip(blocks, source_blocks, strict=True):
            self._content[block] = source._content[other]

    def spoil(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._content[block] = FOREIGN

    def write(self, blocks: Sequence[int], kv: bytes) -> None:
        """Write the KV of a whole context."""
        for index, block in enumerate(blocks[: -(-len(kv) // BLOCK_BYTES)]):
            part = kv[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
            self._content[block] = part + self._content[block][len(part) :]

    # -- cache -------------------------------------------------------------------------------

    def cache(self, blocks: Sequence[int], tokens: tuple[int, ...], salt: str) -> None:
        """Let other requests find the full blocks of ``tokens``."""
        for index, end in enumerate(range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)):
            key, block = (salt, tokens[:end]), blocks[index]
            if key not in self._cached and block not in self._keys:
                self._cached[key], self._keys[block] = block, key

    def check(self, salts: Sequence[str]) -> None:
        """Check that requests with one of ``salts`` find only right KV, and that no block is both
        used and free."""
        for block, users in enumerate(self._num_users):
            assert bool(users) != (block in self._free), f"block {block} has {users} users"
        for (salt, tokens), block in self._cached.items():
            if salt in salts:
                right = b"".join(compute_slots(b"", tokens, 0))  # type: ignore[arg-type]
                assert self._content[block] == right[-BLOCK_BYTES:], (
                    f"wrong KV is cached for {tokens} under salt {salt!r}"
                )
