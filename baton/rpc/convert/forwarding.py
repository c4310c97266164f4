"""Conversion of the messages of a request that is forwarded to a worker's server."""

from collections.abc import AsyncIterator, Iterator

from baton.core.server_api import FORWARDED_HEADERS, ForwardedHead, ForwardRequest
from baton.errors import Invalid, Unavailable
from baton.rpc.v1 import worker_pb2 as pb

PIECE_BYTES = 1 << 20
"""A body travels in pieces of this size, far below the limit of a message."""


def forward_to_proto(request: ForwardRequest) -> Iterator[pb.ForwardRequest]:
    """Yield the messages of a request: its head, then its body in pieces."""
    head = pb.ForwardHead(
        request_id=request.request_id,
        path=request.path,
        content_type=request.content_type,
        num_tokens=request.num_tokens,
    )
    yield pb.ForwardRequest(head=head)
    for start in range(0, len(request.body), PIECE_BYTES):
        yield pb.ForwardRequest(body=request.body[start : start + PIECE_BYTES])


async def forward_from_proto(messages: AsyncIterator[pb.ForwardRequest]) -> ForwardRequest:
    """Read a whole request. Raises Invalid unless it begins with a head."""
    head: pb.ForwardHead | None = None
    body = bytearray()
    async for message in messages:
        if head is not None:
            body += message.body
        elif message.HasField("head"):
            head = message.head
        else:
            break
    if head is None:
        raise Invalid("the first message of a forwarded request must be its `head`")
    return ForwardRequest(
        head.request_id, head.path, head.content_type, bytes(body), head.num_tokens
    )


def forwarded_to_proto(part: ForwardedHead | bytes) -> pb.ForwardResponse:
    if isinstance(part, bytes):
        return pb.ForwardResponse(body=part)
    head = pb.ForwardedHead(status=part.status, headers=part.headers)
    return pb.ForwardResponse(head=head)


def forwarded_from_proto(message: pb.ForwardResponse, *, is_first: bool) -> ForwardedHead | bytes:
    """Decode a part of the answer. Raises Unavailable unless a head comes first, and only then,
    with a status and headers that HTTP allows. Other headers are left out."""
    if message.HasField("head") is not is_first:
        raise Unavailable("the worker's answer does not begin with its head")
    if not is_first:
        return message.body
    head = message.head
    headers = {name: head.headers[name] for name in FORWARDED_HEADERS if name in head.headers}
    if not 200 <= head.status < 600:
        raise Unavailable(f"the server's answer has status {head.status}")
    if not all(text.isascii() and text.isprintable() for text in headers.values()):
        raise Unavailable("the server's answer has headers that are not ASCII")
    return ForwardedHead(head.status, headers)
