"""The client side of gRPC calls: channel options, signing, and translation of errors."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from baton.core.credentials import ClusterCredentials, to_credentials
from baton.errors import BatonError, Overloaded, Unavailable, error_from_grpc_status
from baton.network.call_signing import CallSigner
from baton.network.tls import TLS_NAME, channel_credentials
from baton.rpc.convert.error import parse_retry_after
from baton.rpc.frames import MAX_MESSAGE_BYTES
from baton.rpc.service import Method, Service

RETRY_AFTER_KEY = "retry-after-seconds"

CHANNEL_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that has vanished without closing the connection, or is frozen, is noticed within two
    # seconds. Pings are answered by the peer's network threads, so a busy peer is not taken for
    # dead.
    ("grpc.keepalive_time_ms", 500),  # gRPC waits at least a second between two pings
    ("grpc.keepalive_timeout_ms", 900),
    ("grpc.http2.ping_timeout_ms", 900),  # else gRPC waits a minute, despite keepalive_timeout_ms
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A channel to a worker that has restarted on the same port must not reuse the dead socket.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


TLS_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", TLS_NAME))


def open_channel(address: str, trust: ClusterCredentials | str | None = None) -> grpc.aio.Channel:
    """Open a channel to ``address`` (host:port), which connects on the first call. Raises Invalid
    for certificates that can't be read."""
    trust = to_credentials(trust)
    if trust.has_tls:
        credentials = channel_credentials(trust)
        channel = grpc.aio.secure_channel(address, credentials, options=TLS_OPTIONS)
    else:
        channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    if not trust.secret:
        return channel
    return cast(grpc.aio.Channel, _SigningChannel(channel, CallSigner(trust.secret, address)))


MAX_CHANNELS = 1024
"""Maximum number of open channels to peers; beyond this, the least recently used one is closed."""


class ChannelCache:
    """Channels to peers, one per address."""

    def __init__(self, trust: ClusterCredentials | str | None = None) -> None:
        self._trust = trust
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def get(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.pop(address, None) or open_channel(address, self._trust)
        self._channels[address] = channel
        if len(self._channels) > MAX_CHANNELS:
            oldest = next(iter(self._channels))
            await self._channels.pop(oldest).close()
        return channel

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()


class GrpcCalls:
    """Makes the calls of ``service`` over a channel."""

    def __init__(self, channel: grpc.aio.Channel, service: Service) -> None:
        self._methods = {
            method.name: _multicallable(channel, method) for method in service.methods.values()
        }

    async def call(self, name: str, request: Message, timeout_seconds: float) -> Any:
        """Call a unary method, and return its response. Raises the server's errors,
        DeadlineExceeded and Unavailable."""
        with translated_rpc_errors():
            return await self._methods[name](request, timeout=timeout_seconds)

    def open_stream(self, name: str, *request: Message) -> Any:
        """Call a method with a stream of requests or responses, and return gRPC's call object. Use
        it within :func:`translated_rpc_errors`."""
        return self._methods[name](*request)


def _multicallable(channel: grpc.aio.Channel, method: Method) -> Any:
    kind = f"{_CARDINALITY[method.has_request_stream]}_{_CARDINALITY[method.has_response_stream]}"
    return getattr(channel, kind)(
        method.path, method.request_type.SerializeToString, method.response_type.FromString
    )


_CARDINALITY = {False: "unary", True: "stream"}


async def call_member(
    address: str,
    trust: ClusterCredentials | str | None,
    service: Service,
    name: str,
    request: Message,
    timeout_seconds: float,
) -> Any:
    """Make a single call, as :meth:`GrpcCalls.call`."""
    async with open_channel(address, trust) as channel:
        return await GrpcCalls(channel, service).call(name, request, timeout_seconds)


FAILED_WRITE_DETAILS = "Internal error from Core"
"""The details that grpc.aio gives a call whose message could not be sent, mostly because the peer
has ended the call. The status is INTERNAL then, and that of the peer is lost."""


def translate_rpc_error(error: grpc.aio.AioRpcError) -> BatonError:
    """Return the BatonError that corresponds to the gRPC status with which a peer ended a call. It
    is Unavailable if gRPC could not send a message and reports no status of the peer."""
    message = error.details() or error.code().name
    if error.code() is grpc.StatusCode.INTERNAL and message == FAILED_WRITE_DETAILS:
        return Unavailable("the gRPC call ended before a message could be sent; the reason is lost")
    translated = error_from_grpc_status(error.code().name, message)
    if isinstance(translated, Overloaded):
        for key, value in error.trailing_metadata() or ():
            if key == RETRY_AFTER_KEY and isinstance(value, str):
                translated.retry_after_seconds = parse_retry_after(value)
    return translated


@contextmanager
def translated_rpc_errors() -> Iterator[None]:
    """Context manager that turns gRPC errors into BatonErrors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise translate_rpc_error(error) from error
    except asyncio.InvalidStateError as error:  # a write to a call that has ended
        raise Unavailable("can't write to the stream: the gRPC call has already ended") from error


class _SigningChannel:
    """A channel that signs each call with the cluster secret. gRPC's interceptors could sign calls,
    too, but they leak tasks when a stream breaks."""

    def __init__(self, channel: grpc.aio.Channel, signer: CallSigner) -> None:
        self._channel = channel
        self._signer = signer

    async def __aenter__(self) -> "_SigningChannel":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped channel. This is not called for the methods that
        create calls, which this class defines itself, with signing."""
        return getattr(self._channel, name)

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._signed(method, self._channel.unary_unary(method, *arguments, **options))

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._signed(method, self._channel.unary_stream(method, *arguments, **options))

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._signed(method, self._channel.stream_stream(method, *arguments, **options))

    def _signed(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def signed_call(*arguments: Any, **options: Any) -> Any:
            return call(*arguments, metadata=self._signer.metadata(method), **options)

        return signed_call
