"""Outputs as they travel, for a worker that has no model to wait for: what does not change of an
answer is encoded once, and a step of many answers is one run of bytes."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import FinishReason, RequestOutput
from baton.rpc.convert.common import output_to_proto
from baton.rpc.v1 import worker_pb2 as pb

MAX_KNOWN = 1 << 16
"""Encoded numbers that are remembered, some 100 bytes each."""

_NOTHING = RequestOutput(RequestId(""), Epoch(0), 0, ())


class OutputEncoder:
    """One placement's outputs. Each method gives a whole ``WorkerMessage``; several, one behind the
    other, are one message with all their outputs."""

    __slots__ = ("_head", "_head_size")

    def __init__(self, request_id: RequestId, epoch: Epoch) -> None:
        self._head = _part(request_id=request_id, epoch=epoch)
        self._head_size = len(self._head)

    def token(self, index: int, token_id: TokenId) -> bytes:
        at, token = _index(index), _token(token_id)
        size = encode_varint(self._head_size + len(at) + len(token))
        return b"".join((_TAG, size, self._head, at, token))

    def last(self, index: int, token_id: TokenId, reason: FinishReason) -> bytes:
        return _framed(self._head + _index(index) + _token(token_id) + _reason(reason))


def encode_output(output: RequestOutput) -> bytes:
    """Any output, as a ``WorkerMessage`` of its own."""
    return _framed(output_to_proto(output).SerializeToString())


def _framed(body: bytes) -> bytes:
    return _TAG + encode_varint(len(body)) + body


def _part(**fields: Any) -> bytes:
    """Some fields of an output. Parts behind one another are the message with all their fields."""
    return output_to_proto(replace(_NOTHING, **fields)).SerializeToString()


_TAG = pb.WorkerMessage(outputs=[output_to_proto(_NOTHING)]).SerializeToString()[:1]


@lru_cache(MAX_KNOWN)
def _index(index: int) -> bytes:
    return _part(first_index=index)


@lru_cache(MAX_KNOWN)
def _token(token_id: TokenId) -> bytes:
    return _part(token_ids=(token_id,))


@lru_cache
def _reason(reason: FinishReason) -> bytes:
    return _part(finish_reason=reason)


@lru_cache(MAX_KNOWN)
def encode_varint(value: int) -> bytes:
    """As protobuf writes numbers: seven bits a byte, the lowest first; all but the last byte have
    their highest bit set."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
