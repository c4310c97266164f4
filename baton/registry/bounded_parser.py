"""A parser that limits the size of Redis replies, and ends a connection to a server that is not the
primary. Without the limit, any program that may write to Redis could make members read
gigabytes."""

import re
from typing import Any

from redis._parsers import _AsyncRESP3Parser
from redis.exceptions import ConnectionError, InvalidResponse, RedisError

from baton.registry.limits import MAX_REPLY_BYTES

ELEMENT_BYTES = 64
"""Counted for each element in addition to its data, since empty elements take memory, too."""

_ERROR_IN_SCRIPT = re.compile(r"ERR Error running script .*? -([A-Z]+ .*)", re.DOTALL)
"""How Redis 6 reports that a call of a script has failed. Later versions return the call's error
itself."""


class NotPrimary(ConnectionError):
    """The server is a replica, or has lost its primary, replicas or cluster. The address may lead
    to another server by now, so the client connects again, as after any ConnectionError."""


class BoundedParser(_AsyncRESP3Parser):
    """The parser of redis-py, with two differences: a reply of more than ``MAX_REPLY_BYTES`` ends
    the connection with InvalidResponse, and a server that is not the primary ends it with
    NotPrimary."""

    EXCEPTION_CLASSES = _AsyncRESP3Parser.EXCEPTION_CLASSES | dict.fromkeys(
        ("READONLY", "MASTERDOWN", "NOREPLICAS", "CLUSTERDOWN"), NotPrimary
    )

    _remaining_bytes = MAX_REPLY_BYTES

    @classmethod
    def parse_error(cls, response: str) -> RedisError:
        found = _ERROR_IN_SCRIPT.fullmatch(response)
        text = found[1] if found else response
        error: RedisError = super().parse_error(text)  # type: ignore[no-untyped-call]
        return error

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
