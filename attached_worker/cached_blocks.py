"""The blocks that the server has cached, under Baton's keys, for conductors to watch."""

from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.core.block_key import KeyRoot, block_keys
from baton.core.ids import BlockKey, Incarnation
from baton.core.store import Tier, WatchEvent
from baton.errors import Corrupt
from baton.kv.event_log import PAGE_KEYS, BlockFeed, EventLog

MAX_SALTS = 10_000
"""Salts that are remembered, about 2 MB. One that was forgotten is learned again with the next
request that has it."""

ServerBlockId = int | bytes
"""The server's own name for a block: a hash of its tokens and of all before them."""


@dataclass(slots=True)
class _Block:
    """``num_copies`` blocks of the server have these tokens. Without a ``key``, the salt is not
    known yet, and ``parent`` and ``tokens`` are kept to compute the key later."""

    key: BlockKey | None
    salt_name: str
    parent: ServerBlockId | None = None
    tokens: "array[int] | None" = None
    num_copies: int = 1


class CachedBlocks:
    """What the server has cached. ``root`` has what the keys of all its requests have in common;
    ``num_blocks`` is how many blocks the server can have. While ``is_complete`` is False, some
    cached blocks may be missing, and the worker must not report any; ``on_change`` is called when
    that changes. All methods run in the event loop."""

    def __init__(
        self,
        root: KeyRoot,
        generation: Incarnation,
        num_blocks: int,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._root = root
        self._num_blocks = num_blocks
        self._on_change = on_change
        self.is_complete = False
        self._blocks: dict[ServerBlockId, _Block] = {}
        self._num_copies = 0
        self._salts: OrderedDict[str, bytes] = OrderedDict()
        self._log = EventLog()
        self._feed = BlockFeed(generation, self._log, self._keys)

    @property
    def block_tokens(self) -> int:
        return self._root.block_tokens

    def watch(self, generation: Incarnation, number: int) -> AsyncGenerator[WatchEvent]:
        """See :meth:`baton.kv.event_log.BlockFeed.watch`."""
        return self._feed.watch(generation, number)

    def learn_salt(self, name: str, salt: bytes) -> None:
        """Remember a tenant's salt, and the name under which the server knows it."""
        is_new = name not in self._salts
        self._salts[name] = salt
        self._salts.move_to_end(name)
        if len(self._salts) > MAX_SALTS:
            self._salts.popitem(last=False)
        if is_new:
            self._add_keys(name)

    def store(
        self,
        ids: Sequence[ServerBlockId],
        parent: ServerBlockId | None,
        token_ids: Sequence[int],
        salt_name: str,
    ) -> None:
        """Add consecutive blocks with ``token_ids``, of as many tokens each as all blocks have.
        They follow the block ``parent``, or begin a prompt whose salt is ``salt_name``; empty if it
        has none. Blocks after an unknown block are left out. Raises Corrupt if the number of tokens
        is wrong, or if the server can't have so many blocks."""
        if len(token_ids) != len(ids) * self._root.block_tokens:
            raise Corrupt(
                f"{len(ids)} blocks of {self._root.block_tokens} tokens have {len(token_ids)} "
                "tokens"
            )
        if parent is not None and parent not in self._blocks:
            return
        if parent is not None:
            salt_name = self._blocks[parent].salt_name
        added: list[BlockKey] = []
        words, size = array("I", token_ids), self._root.block_tokens
        for index, block_id in enumerate(ids):
            tokens = words[index * size : (index + 1) * size]
            self._add_copy(block_id, parent, tokens, salt_name, added)
            parent = block_id
        self._log.append(Tier.DRAM, added)
        if self._num_copies > self._num_blocks:
            raise Corrupt(f"the server reports more than its {self._num_blocks} blocks")

    def remove(self, ids: Sequence[ServerBlockId]) -> None:
        """Remove one copy of each block. Unknown blocks are ignored."""
        removed: list[BlockKey] = []
        for block_id in ids:
            block = self._blocks.get(block_id)
            if block is None:
                continue
            block.num_copies -= 1
            self._num_copies -= 1
            if not block.num_copies:
                del self._blocks[block_id]
                if block.key is not None:
                    removed.append(block.key)
        self._log.append(Tier.NONE, removed)

    def clear(self, *, is_complete: bool) -> None:
        """Remove all blocks. ``is_complete``: whether the server has none either."""
        keys = self._keys()[Tier.DRAM]
        for start in range(0, len(keys), PAGE_KEYS):
            self._log.append(Tier.NONE, keys[start : start + PAGE_KEYS])
        self._blocks.clear()
        self._num_copies = 0
        self._set_complete(is_complete)

    def complete(self) -> None:
        """Declare that no cached block is missing."""
        self._set_complete(True)

    def _set_complete(self, is_complete: bool) -> None:
        if is_complete != self.is_complete:
            self.is_complete = is_complete
            self._on_change()

    def __len__(self) -> int:
        return len(self._blocks)

    def _add_copy(
        self,
        block_id: ServerBlockId,
        parent: ServerBlockId | None,
        tokens: "array[int]",
        salt_name: str,
        added: list[BlockKey],
    ) -> None:
        self._num_copies += 1
        known = self._blocks.get(block_id)
        if known is not None:
            known.num_copies += 1
            return
        key = self._key(parent, tokens, salt_name)
        if key is None:
            self._blocks[block_id] = _Block(None, salt_name, parent, tokens)
            return
        self._blocks[block_id] = _Block(key, salt_name)
        added.append(key)

    def _key(
        self, parent: ServerBlockId | None, tokens: "array[int]", salt_name: str
    ) -> BlockKey | None:
        """Return the key of a block, or None if its salt is not known."""
        before: BlockKey | None
        if parent is not None:
            before = self._blocks[parent].key if parent in self._blocks else None
        elif salt_name and salt_name not in self._salts:
            before = None
        else:
            before = replace(self._root, tenant_salt=self._salts.get(salt_name, b"")).key()
        return None if before is None else block_keys(before, tokens, len(tokens))[0]

    def _add_keys(self, salt_name: str) -> None:
        """Compute the keys of the blocks whose salt was unknown. A block was stored after those
        before it."""
        added: list[BlockKey] = []
        for block in self._blocks.values():
            if block.key is None and block.salt_name == salt_name and block.tokens is not None:
                block.key = self._key(block.parent, block.tokens, salt_name)
                if block.key is not None:
                    block.tokens = None
                    added.append(block.key)
        self._log.append(Tier.DRAM, added)

    def _keys(self) -> Mapping[Tier, Sequence[BlockKey]]:
        """The tiers are those of store nodes; a server's own memory counts as DRAM."""
        keys = [block.key for block in self._blocks.values() if block.key is not None]
        return {Tier.DRAM: keys}
