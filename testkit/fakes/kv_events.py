"""A prefix cache of vLLM's that publishes its KV events, with vLLM's wire forms and no KV."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import zmq
import zmq.asyncio

END = (-1).to_bytes(8, "big", signed=True)


class FakeKvEvents:
    """Keeps the ``num_blocks`` blocks that were used last. With ``as_arrays``, events have the form
    of vLLM 0.28, otherwise that of 0.32. Call :meth:`open` in the event loop that uses it."""

    def __init__(
        self,
        folder: Path,
        num_blocks: int = 200,
        block_tokens: int = 16,
        *,
        as_arrays: bool = False,
        buffer_steps: int = 10_000,
    ) -> None:
        self.events = f"ipc://{folder}/events"
        self.replay = f"ipc://{folder}/replay"
        self.lose = False
        """Whether subscribers get no batches, as if a queue were full."""

        self._num_blocks, self._block_tokens = num_blocks, block_tokens
        self._as_arrays = as_arrays
        self._buffer: list[bytes] = []
        self._first = 0
        self._buffer_steps = buffer_steps
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def open(self) -> None:
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.XPUB)
        self._publisher.bind(self.events)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.replay)
        self._replaying = asyncio.create_task(self._serve_replays())

    async def close(self) -> None:
        self._replaying.cancel()
        await asyncio.gather(self._replaying, return_exceptions=True)
        self._context.destroy(linger=0)

    async def subscribed(self) -> None:
        """Wait until there is a subscriber."""
        await self._publisher.recv()

    async def use(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Cache the blocks of a prompt. Return how many of its tokens were cached before."""
        size = self._block_tokens
        chunks = [list(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
        ids: list[int] = []
        for chunk in chunks:
            if len(chunk) == size:
                ids.append(_hash(ids[-1] if ids else None, chunk, "" if ids else salt))
        num_cached = next((i for i, each in enumerate(ids) if each not in self._blocks), len(ids))
        for each in reversed(ids):
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        events = []
        while len(self._blocks) > self._num_blocks:
            evicted, _ = self._blocks.popitem(last=False)
            events.append(self._event("BlockRemoved", block_hashes=[evicted]))
        if num_cached < len(ids):
            new = range(num_cached, len(ids))
            stored = self._event(
                "BlockStored",
                block_hashes=[ids[i] for i in new],
                parent_block_hash=ids[num_cached - 1] if num_cached else None,
                token_ids=[token for i in new for token in chunks[i]],
                block_size=size,
                lora_id=None,
                extra_keys=[[salt] if salt and i == 0 else None for i in new],
                kv_cache_spec_kind="full_attention",
            )
            await self.publish([*events, stored])
        return num_cached * size

    async def clear(self) -> None:
        self._blocks.clear()
        await self.publish(
            [["AllBlocksCleared"] if self._as_arrays else {"type": "AllBlocksCleared"}]
        )

    async def publish(self, events: Sequence[object]) -> None:
        number = self._first + len(self._buffer)
        payload = msgpack.packb([float(id(self)) + number, list(events), 0])
        self._buffer.append(payload)
        if len(self._buffer) > self._buffer_steps:
            del self._buffer[0]
            self._first += 1
        if not self.lose:
            await self._publisher.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def _event(self, name: str, **fields: Any) -> object:
        fields |= {"medium": "GPU", "group_idx": 0}
        if not self._as_arrays:
            return {"type": name, **fields}
        names = _STORED if name == "BlockStored" else ("block_hashes", "medium", "group_idx")
        return [name, *(fields.get(each) for each in names)]

    async def _serve_replays(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            topic = [] if self._as_arrays else [b""]
            for number, payload in enumerate(self._buffer, self._first):
                if number >= int.from_bytes(start, "big"):
                    frames = [client, b"", *topic, number.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(frames)
            await self._router.send_multipart([client, b"", *topic, END, b""])


_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
)  # fmt: skip


def _hash(parent: int | None, tokens: Sequence[int], salt: str) -> int:
    data = repr((parent, tokens, salt)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
