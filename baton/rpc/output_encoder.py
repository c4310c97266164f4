"""Encodes the outputs of mock workers, whose speed is not limited by a model. The fields that are
the same in all outputs of a request are encoded once, and the message of a step is the
concatenation of its encoded outputs."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import FinishReason, RequestOutput
from baton.rpc.convert.common import output_to_proto
from baton.rpc.v1 import worker_pb2 as pb

MAX_CACHED_NUMBERS = 1 << 16
"""Encoded numbers that are cached, some 100 bytes each."""

_NOTHING = RequestOutput(RequestId(""), Epoch(0), 0, ())


class OutputEncoder:
    """Encodes the outputs of one placement. Each method returns a whole ``WorkerMessage``; the
    concatenation of several messages is one message with all their outputs."""

    __slots__ = ("_head", "_head_size")

    def __init__(self, request_id: RequestId, epoch: Epoch) -> None:
        self._head = _part(request_id=request_id, epoch=epoch)
        self._head_size = len(self._head)

    def encode_token(self, index: int, token_id: TokenId) -> bytes:
        at, token = _index(index), _token(token_id)
        size = encode_varint(self._head_size + len(at) + len(token))
        return b"".join((_TAG, size, self._head, at, token))

    def encode_last_token(self, index: int, token_id: TokenId, reason: FinishReason) -> bytes:
        return _framed(self._head + _index(index) + _token(token_id) + _reason(reason))


def encode_output(output: RequestOutput) -> bytes:
    """Encode any output as a ``WorkerMessage`` of its own."""
    return _framed(output_to_proto(output).SerializeToString())


def _framed(body: bytes) -> bytes:
    return _TAG + encode_varint(len(body)) + body


def _part(**fields: Any) -> bytes:
    """Encode some fields of an output. The concatenation of such parts is an output with all their
    fields."""
    return output_to_proto(replace(_NOTHING, **fields)).SerializeToString()


_TAG = pb.WorkerMessage(outputs=[output_to_proto(_NOTHING)]).SerializeToString()[:1]


@lru_cache(MAX_CACHED_NUMBERS)
def _index(index: int) -> bytes:
    return _part(first_index=index)


@lru_cache(MAX_CACHED_NUMBERS)
def _token(token_id: TokenId) -> bytes:
    return _part(token_ids=(token_id,))


@lru_cache
def _reason(reason: FinishReason) -> bytes:
    return _part(finish_reason=reason)


@lru_cache(MAX_CACHED_NUMBERS)
def encode_varint(value: int) -> bytes:
    """Encode a number as protobuf does: seven bits per byte, lowest first; all bytes but the last
    have their highest bit set."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
