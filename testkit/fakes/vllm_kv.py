"""The KV of a fake server: what it holds for a prompt are the prompt's tokens, or, if it has read
them where something else lay, other tokens."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

BLOCK_TOKENS = 16
_NUMBERS = itertools.count()
_ENGINES: dict[str, "FakeKv"] = {}
"""All engines of this process, by id: readers reach each other's memory."""


class FakeKv:
    """KV that is lent to other servers, read from them, and cached by salt and prompt."""

    def __init__(self, step: asyncio.Event) -> None:
        self.engine_id = f"engine-{next(_NUMBERS)}"
        self.address = ("127.0.0.1", 1)
        """Where engines of other processes read what is lent."""

        self.is_reachable = True
        self.step = step
        """Cleared: the engine is frozen, and nobody can read from it."""

        self.lent: dict[str, list[int]] = {}
        self._cached: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        _ENGINES[self.engine_id] = self

    def lend(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Return the parameters with which another server reads the KV of ``prompt``."""
        name = f"request-{next(_NUMBERS)}"
        self.lent[name] = list(prompt)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(-(-len(prompt) // BLOCK_TOKENS)))],
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_num_tokens": len(prompt),
            "remote_host": self.address[0],
            "remote_port": self.address[1],
            "tp_size": 1,
        }

    def reuse(self) -> None:
        """Have others write where lent KV lies, as happens after its time."""
        for name, prompt in self.lent.items():
            self.lent[name] = [7 for _ in prompt]

    async def known(self, request: dict[str, Any]) -> list[int]:
        """Return the tokens that the KV of the request's prompt stands for. Raises AssertionError,
        which ends a server, if the other one has too few blocks."""
        prompt, salt = list(request["prompt"]), str(request.get("cache_salt"))
        parameters = request.get("kv_transfer_params") or {}
        if not parameters.get("do_remote_prefill"):
            return list(self._cached.get((salt, tuple(prompt)), prompt))
        (blocks,) = parameters["remote_block_ids"]
        assert -(-len(prompt) // BLOCK_TOKENS) <= len(blocks), "more local than remote blocks"
        read = await _read(parameters)
        if read is None:
            return prompt  # computed here
        known = read + prompt[len(read) :]
        self._cached[salt, tuple(prompt)] = known
        return known


async def _read(parameters: dict[str, Any]) -> list[int] | None:
    """Return the tokens of lent KV; None if its engine can't be reached. An engine of another
    process gets the request's name in a line, and sends the tokens as JSON."""
    name = parameters["remote_request_id"]
    lender = _ENGINES.get(parameters["remote_engine_id"])
    if lender is not None:
        return lender.lent.pop(name) if lender.is_reachable else None
    host, port = parameters["remote_host"], parameters["remote_port"]
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return None
    writer.write(f"{name}\n".encode())
    tokens: list[int] | None = json.loads(await reader.read() or "null")
    writer.close()
    return tokens


def lender_of(request: dict[str, Any]) -> FakeKv | None:
    """Return the engine of this process that the request reads KV from."""
    parameters = request.get("kv_transfer_params") or {}
    return _ENGINES.get(parameters.get("remote_engine_id") or "")
