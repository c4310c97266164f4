"""Encodes and numbers the server-sent events of a response."""

from collections.abc import Mapping
from typing import Any

import orjson

from router.openai.encoders.encoder import OBFUSCATION_BLOCK_BYTES


class EventStream:
    """Encodes the events of one stream, and numbers them from 0. If ``is_obfuscated`` is True,
    deltas are padded so that their sizes don't reveal their contents."""

    def __init__(self, *, is_obfuscated: bool) -> None:
        self._is_obfuscated = is_obfuscated
        self._num_events = 0
        self._delta_prefix = b""

    @property
    def has_begun(self) -> bool:
        return self._num_events > 0

    def encode(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        if self._is_obfuscated and kind.endswith(".delta"):
            data = b'%b,"obfuscation":"%b"}' % (data[:-1], _padding(data))
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def set_delta(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Set the type of the next deltas, and the fields that they have in common."""
        data = orjson.dumps({"type": kind, **fields})
        self._delta_prefix = b'event: %b\ndata: %b,"delta":' % (kind.encode(), data[:-1])

    def encode_delta(self, text: str) -> bytes:
        """Encode an event that adds text. This is called once per token."""
        number, data = self._num_events, orjson.dumps(text)
        self._num_events = number + 1
        if self._is_obfuscated:
            end = b',"sequence_number":%d,"obfuscation":"%b"}\n\n' % (number, _padding(data))
            return self._delta_prefix + data + end
        return self._delta_prefix + data + b',"sequence_number":%d}\n\n' % number


def _padding(data: bytes) -> bytes:
    return b"0" * (-len(data) % OBFUSCATION_BLOCK_BYTES)
