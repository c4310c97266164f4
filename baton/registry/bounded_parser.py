"""A parser that limits the size of Redis replies. Without a limit, any program that may write to
Redis could make members read gigabytes."""

from typing import Any

from redis._parsers import _AsyncRESP3Parser
from redis.exceptions import InvalidResponse

MAX_REPLY_BYTES = 32 * 1024 * 1024
"""Maximum size of a reply. A reply with 4,096 members has 12 MB."""

ELEMENT_BYTES = 64
"""Counted for each element in addition to its data, since empty elements take memory, too."""


class BoundedParser(_AsyncRESP3Parser):
    """The parser of redis-py, except that a reply of more than ``MAX_REPLY_BYTES`` ends the
    connection with InvalidResponse."""

    _remaining_bytes = MAX_REPLY_BYTES

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        self._remaining_bytes = MAX_REPLY_BYTES
        return await super().read_response(*arguments, **options)

    async def _read(self, length: int) -> bytes:
        self._count_bytes(length)
        return await super()._read(length)

    async def _readline(self) -> bytes:
        line: bytes = await super()._readline()
        self._count_bytes(len(line) + ELEMENT_BYTES)
        return line

    def _count_bytes(self, size_bytes: int) -> None:
        self._remaining_bytes -= size_bytes
        if self._remaining_bytes < 0:
            raise InvalidResponse(
                f"Redis sent a reply of more than {MAX_REPLY_BYTES >> 20} MiB; Baton stores no "
                "value that large"
            )
