"""Replies of Redis with a bound: whoever may write there could have us read gigabytes."""

from typing import Any

from redis._parsers import _AsyncRESP3Parser
from redis.exceptions import InvalidResponse

MAX_REPLY_BYTES = 32 * 1024 * 1024
"""4,096 members are 12 MB."""

ELEMENT_BYTES = 64
"""A list of nothings takes memory, too."""


class BoundedParser(_AsyncRESP3Parser):
    """The client's own, and a reply of more than ``MAX_REPLY_BYTES`` ends the connection with
    InvalidResponse."""

    _left = MAX_REPLY_BYTES

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        self._left = MAX_REPLY_BYTES
        return await super().read_response(*arguments, **options)

    async def _read(self, length: int) -> bytes:
        self._spend(length)
        return await super()._read(length)

    async def _readline(self) -> bytes:
        line: bytes = await super()._readline()
        self._spend(len(line) + ELEMENT_BYTES)
        return line

    def _spend(self, size_bytes: int) -> None:
        self._left -= size_bytes
        if self._left < 0:
            raise InvalidResponse(
                f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB: nothing of ours is so large"
            )
