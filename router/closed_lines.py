"""Lines that can't be opened: a firewall may let gRPC's port through and no other."""

import asyncio

AGAIN_SECONDS = 300.0
"""Until then gRPC serves instead. To try is to fail the requests that were on the line."""

MAX_CLOSED = 4096


class ClosedLines:
    """By address, for some minutes; of too many the oldest are forgotten."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def add(self, address: str) -> None:
        if len(self._since) >= MAX_CLOSED:
            del self._since[next(iter(self._since))]
        self._since[address] = asyncio.get_running_loop().time()

    def __contains__(self, address: str) -> bool:
        since = self._since.get(address)
        return since is not None and asyncio.get_running_loop().time() < since + AGAIN_SECONDS
