"""The server side of gRPC calls: options, authentication, and mapping of errors to status codes."""

from collections.abc import Callable
from inspect import isawaitable
from typing import Any, cast

import grpc
import grpc.aio

from baton.core.credentials import ClusterCredentials, to_credentials
from baton.errors import BatonError, Overloaded, Unavailable, error_mapping
from baton.network.address import host_port
from baton.network.call_signing import CallVerifier
from baton.network.grpc_limits import SERVER_LIMITS, raise_open_file_limit
from baton.network.listeners import announce_listener, member_authentication
from baton.network.tls import server_credentials
from baton.rpc.channel import RETRY_AFTER_KEY
from baton.rpc.frames import MAX_MESSAGE_BYTES
from baton.rpc.service import Method, Service

SERVER_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Members ping much more often than gRPC's defaults allow.
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    *SERVER_LIMITS,
)


def build_server(trust: ClusterCredentials | str | None = None) -> grpc.aio.Server:
    """Build a server without services. If ``trust`` has a secret, calls that are not signed with it
    fail with UNAUTHENTICATED, and their messages are not read."""
    secret = to_credentials(trust).secret
    if not secret:
        return grpc.aio.server(options=SERVER_OPTIONS)
    checker = CallVerifier(secret)
    server = grpc.aio.server(
        options=SERVER_OPTIONS, interceptors=[_AuthenticationInterceptor(checker)]
    )
    return cast(grpc.aio.Server, _AuthenticatedServer(server, checker))


async def listen(
    server: grpc.aio.Server,
    host: str,
    port: int,
    trust: ClusterCredentials | str | None = None,
    advertised: str | None = None,
) -> int:
    """Bind and start the server, and return the port. ``advertised`` is the host at which clients
    reach the server (default: ``host``); signed calls for any other address are refused. Raises
    Unavailable if the port can't be bound, and Invalid if the certificates can't be read."""
    trust, address = to_credentials(trust), host_port(host, port)
    raise_open_file_limit()
    try:
        if trust.has_tls:
            bound = server.add_secure_port(address, server_credentials(trust))
        else:
            bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise Unavailable(f"can't listen on {address}: is the port in use?") from error
    if isinstance(server, _AuthenticatedServer):
        server.checker.own_addresses.add(host_port(advertised or host, int(bound)))
    await server.start()
    announce_listener("grpc", host_port(host, int(bound)), member_authentication(trust))
    return int(bound)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> None:
    """End the call with the status for ``error``. Always raises."""
    status = getattr(grpc.StatusCode, error_mapping(error).grpc_status)
    trailing: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded):
        trailing = ((RETRY_AFTER_KEY, f"{error.retry_after_seconds:.3f}"),)
    await context.abort(status, str(error) or type(error).__name__, trailing)


def add_service(server: grpc.aio.Server, service: Service, handlers: object) -> None:
    """Serve those methods of ``service`` that ``handlers`` has, under their names in snake case. A
    handler gets the request, or an iterator of the requests, and returns the response, or a
    coroutine for it. If the responses are a stream, it is a coroutine function, which also gets a
    function to write a response."""
    table = {
        method.name: _grpc_handler(method, getattr(handlers, method.handler))
        for method in service.methods.values()
        if hasattr(handlers, method.handler)
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service.full_name, table),)
    )


def _grpc_handler(method: Method, handle: Callable[..., Any]) -> Any:
    async def call(request: Any, context: Any) -> Any:
        try:
            response = handle(request)
            return await response if isawaitable(response) else response
        except BatonError as error:
            await abort(context, error)

    async def stream(request: Any, context: Any) -> None:
        try:
            await handle(request, context.write)
        except BatonError as error:
            await abort(context, error)

    codec = method.request_type.FromString, method.response_type.SerializeToString
    if method.is_unary:
        return grpc.unary_unary_rpc_method_handler(call, *codec)
    if not method.has_request_stream:
        return grpc.unary_stream_rpc_method_handler(stream, *codec)
    return grpc.stream_stream_rpc_method_handler(stream, *codec)


class _AuthenticatedServer:
    """A server together with its verifier, which must know the server's addresses."""

    def __init__(self, server: grpc.aio.Server, checker: CallVerifier) -> None:
        self._server = server
        self.checker = checker

    def __getattr__(self, name: str) -> Any:
        """Delegate everything else to the server."""
        return getattr(self._server, name)


class _AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that are not signed with the cluster secret."""

    def __init__(self, checker: CallVerifier) -> None:
        self._checker = checker

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        reason = self._checker.refusal(details.method, details.invocation_metadata)
        return await continuation(details) if not reason else _refusing(reason)


def _refusing(reason: str) -> Any:
    """Return a handler that refuses a call without reading it. It is a stream handler, since gRPC
    reads the message of a unary call, up to 16 MiB, before it calls the handler."""

    async def refuse(_requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

    return grpc.stream_stream_rpc_method_handler(refuse)
