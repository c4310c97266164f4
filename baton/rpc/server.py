"""Server side of gRPC: options, the cluster secret, errors of ours to status codes."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from baton.core.address import host_port
from baton.core.trust import Trust, trust_of
from baton.errors import BatonError, Overloaded, Unavailable, mapping_of
from baton.rpc.channel import RETRY_AFTER_KEY, SECRET_KEY
from baton.rpc.frames import MAX_MESSAGE_BYTES
from baton.tls import server_credentials

SERVER_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Ours ping much more often than gRPC's defaults take for polite.
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers on one port would silently split the traffic.
    ("grpc.so_reuseport", 0),
)


def build_server(trust: Trust | str | None = None) -> grpc.aio.Server:
    """A server without services yet. With a secret, calls without it get UNAUTHENTICATED."""
    secret = trust_of(trust).secret
    interceptors = [_SecretGate(secret)] if secret else []
    return grpc.aio.server(options=SERVER_OPTIONS, interceptors=interceptors)


async def listen(
    server: grpc.aio.Server, host: str, port: int, trust: Trust | str | None = None
) -> int:
    """Binds and starts; returns the port. Raises Unavailable when it can't be bound, Invalid for
    certificates that can't be read."""
    trust, address = trust_of(trust), host_port(host, port)
    try:
        if trust.has_tls:
            bound = server.add_secure_port(address, server_credentials(trust))
        else:
            bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise Unavailable(f"can't listen on {address}: is the port in use?") from error
    await server.start()
    return int(bound)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> None:
    """Ends the call with the status that stands for ``error``. Always raises."""
    status = getattr(grpc.StatusCode, mapping_of(error).grpc_status)
    trailing: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded):
        trailing = ((RETRY_AFTER_KEY, f"{error.retry_after_seconds:.3f}"),)
    await context.abort(status, str(error) or type(error).__name__, trailing)


async def answer(
    context: grpc.aio.ServicerContext[Any, Any], call: Callable[[], Awaitable[Any]]
) -> Any:
    """Runs ``call`` and answers its value; an error of ours becomes its status."""
    try:
        return await call()
    except BatonError as error:
        return await abort(context, error)


class _SecretGate(grpc.aio.ServerInterceptor):
    """Refuses every call that does not carry the cluster secret."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        for key, value in details.invocation_metadata:
            if key == SECRET_KEY and hmac.compare_digest(_as_bytes(value), self._secret):
                return await continuation(details)
        return _refusal(await continuation(details))


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _refusal(handler: Any) -> Any:
    """A handler of the same shape as ``handler`` that refuses."""
    if handler is None:
        return None
    message = "the cluster secret is missing or wrong (setting cluster_secret)"

    async def refuse(_request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)

    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
