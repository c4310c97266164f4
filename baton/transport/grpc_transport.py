"""Transfers KV over gRPC. This works over any TCP connection, but the bytes are copied into
messages and out of them.

Each transport runs a small server of its own, with a single method, so that KV never queues behind
control messages. A request is a packed list of ranges; the response is a stream of raw bytes, those
of the ranges in order.
"""

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.clock import Clock
from baton.core.credentials import ClusterCredentials, to_credentials
from baton.core.kv_transfer import Endpoint
from baton.errors import Invalid, Unavailable
from baton.network.address import host_port
from baton.network.call_signing import CallSigner, CallVerifier
from baton.network.grpc_limits import SERVER_LIMITS, raise_open_file_limit
from baton.network.listeners import announce_listener, member_authentication
from baton.network.tls import TLS_NAME, channel_credentials, server_credentials
from baton.transport.base import Capabilities, Region, TransferRange, TransferState
from baton.transport.link_meter import LinkMeter, earlier_generations
from baton.transport.memory_copier import HostMemoryCopier, MemoryCopier, open_memory_copier
from baton.transport.ranges import expect_transport, validated_ranges

NAME = "grpc"
PATH = "/baton.KvData/Read"
MESSAGE_BYTES = 2 * 1024 * 1024
REQUEST_BYTES = 2 * 1024 * 1024
"""Maximum size of a request: 131,000 ranges, twice as many as a transfer may have."""

MAX_READERS = 8
"""Maximum number of streams that are served concurrently, and of streams that are read
concurrently; further ones wait in a queue until their deadline."""

MAX_WAITING = 1024
"""Maximum number of streams that are served or wait to be served; further ones are refused."""

_HEADER = struct.Struct("<QI")
_SPAN = struct.Struct("<QQ")
_OPTIONS = (
    ("grpc.max_receive_message_length", 4 * MESSAGE_BYTES),
    ("grpc.max_send_message_length", REQUEST_BYTES),
    ("grpc.http2.lookahead_bytes", 16 * MESSAGE_BYTES),
    ("grpc.http2.max_frame_size", 4 * MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", REQUEST_BYTES),
    ("grpc.max_send_message_length", 4 * MESSAGE_BYTES),
    *SERVER_LIMITS,
)


@dataclass(eq=False, slots=True)
class GrpcPeer:
    endpoint: Endpoint
    channel: Any
    read: Any
    signer: CallSigner | None
    transfers: "set[GrpcTransfer]" = field(default_factory=set)


@dataclass(eq=False, slots=True)
class GrpcTransfer:
    """A batch of reads. ``future`` is done when the thread that reads the responses has finished;
    after that, nothing writes to the local region."""

    peer: GrpcPeer
    ranges: list[TransferRange]
    size_bytes: int
    timeout_seconds: float
    error: str = ""
    call: Any = None
    future: "Future[None] | None" = None
    state: TransferState = TransferState.PREPARED


class GrpcTransport:
    name = NAME

    def __init__(
        self,
        owner: str,
        generation: int,
        clock: Clock,
        host_id: str,
        *,
        listen_host: str = "127.0.0.1",
        advertise_host: str | None = None,
        trust: ClusterCredentials | str | None = None,
    ) -> None:
        self._owner = owner
        self._generation = generation
        self._clock = clock
        self._host_id = host_id
        self._listen_host = listen_host
        self._advertise_host = advertise_host or listen_host
        self._trust = to_credentials(trust)
        secret = self._trust.secret
        self._checker = CallVerifier(secret, clock) if secret else None
        self._region: Region | None = None
        self._copies: MemoryCopier = HostMemoryCopier()
        self._server: Any = None
        self._port = 0
        self._peers: dict[tuple[str, int], GrpcPeer] = {}
        self._lock = threading.RLock()
        self._readers = ThreadPoolExecutor(MAX_READERS, thread_name_prefix="kv-read")
        self._meter = LinkMeter()

    def capabilities(self) -> Capabilities:
        return Capabilities(
            local_only=False, devices=frozenset({"cpu", "cuda"}), copies_in_post=False
        )

    def register(self, region: Region) -> None:
        self._copies = open_memory_copier(region.device)
        self._region = region
        threads = ThreadPoolExecutor(MAX_READERS, thread_name_prefix="kv-serve")
        self._server = grpc.server(
            threads, options=_SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_WAITING
        )
        self._server.add_generic_rpc_handlers((_AuthenticatedHandler(self._serve, self._checker),))
        raise_open_file_limit()
        try:
            self._port = self._bind(host_port(self._listen_host, 0))
        except RuntimeError as error:
            raise Unavailable(f"transport grpc can't listen: {error}") from error
        if self._checker is not None:
            self._checker.own_addresses.add(host_port(self._advertise_host, self._port))
        self._server.start()
        announce_listener(
            "kv", host_port(self._listen_host, self._port), member_authentication(self._trust)
        )

    def _bind(self, address: str) -> int:
        if self._trust.has_tls:
            return int(self._server.add_secure_port(address, server_credentials(self._trust)))
        return int(self._server.add_insecure_port(address))

    def export(self) -> Endpoint:
        assert self._region is not None, "register() must be called first"
        address = host_port(self._advertise_host, self._port).encode()
        size = self._region.size_bytes
        return Endpoint(NAME, self._owner, self._generation, self._host_id, size, address)

    def connect(self, endpoint: Endpoint) -> GrpcPeer:
        expect_transport(endpoint, NAME)
        key = (endpoint.owner, endpoint.generation)
        with self._lock:
            if key not in self._peers:
                added = _open(endpoint, self._trust, self._clock)
                for dead in earlier_generations(self._peers, endpoint):
                    self.disconnect(dead)
                self._peers[key] = added
            return self._peers[key]

    def disconnect(self, peer: GrpcPeer) -> None:
        if self._peers.pop((peer.endpoint.owner, peer.endpoint.generation), None) is not None:
            for transfer in list(peer.transfers):
                if transfer.call is not None:
                    transfer.call.cancel()
            peer.channel.close()

    def idle_peers(self) -> list[GrpcPeer]:
        with self._lock:
            return [peer for peer in self._peers.values() if not peer.transfers]

    def prepare(
        self, peer: GrpcPeer, ranges: Sequence[TransferRange], timeout_seconds: float
    ) -> GrpcTransfer:
        assert self._region is not None, "register() must be called first"
        joined = validated_ranges(ranges, self._region, peer.endpoint)
        size = sum(span.size_bytes for span in joined)
        return GrpcTransfer(peer, joined, size, timeout_seconds)

    def post(self, transfer: GrpcTransfer) -> None:
        assert transfer.state is TransferState.PREPARED, transfer.state
        transfer.state = TransferState.PENDING
        transfer.peer.transfers.add(transfer)
        signer = transfer.peer.signer
        metadata = signer.metadata(PATH) if signer is not None else None
        try:
            transfer.call = transfer.peer.read(
                _pack(transfer.peer.endpoint.generation, transfer.ranges),
                timeout=transfer.timeout_seconds,
                metadata=metadata,
            )
        except ValueError as error:  # the channel was closed
            transfer.state, transfer.error = TransferState.FAILED, str(error)
            return
        transfer.future = self._readers.submit(self._read, transfer)

    def poll(self, transfer: GrpcTransfer) -> TransferState:
        if transfer.state is TransferState.PENDING and transfer.future is not None:
            if not transfer.future.done():
                return TransferState.PENDING
            transfer.state = TransferState.FAILED if transfer.error else TransferState.DONE
        return transfer.state

    def release(self, transfer: GrpcTransfer) -> bool:
        """End the transfer, and return True. If a message is being copied, wait for that copy."""
        transfer.peer.transfers.discard(transfer)
        if transfer.call is not None:
            transfer.call.cancel()
        if transfer.future is not None and not transfer.future.cancel():
            wait([transfer.future])
        transfer.state = TransferState.RELEASED
        return True

    def estimate_seconds(self, peer: GrpcPeer, size_bytes: int) -> float:
        return self._meter.estimate_seconds(peer.endpoint.owner, size_bytes)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self.disconnect(peer)
        self._readers.shutdown(wait=True, cancel_futures=True)
        if self._server is not None:
            stopped: threading.Event = self._server.stop(grace=0.2)
            stopped.wait()

    def _read(self, transfer: GrpcTransfer) -> None:
        """Write the bytes of every message to the local ranges. Runs in a thread."""
        assert self._region is not None
        began = self._clock.monotonic()
        writer = _RangeWriter(self._region.address, transfer.ranges, self._copies)
        try:
            for message in transfer.call:
                writer.write(message)
        except grpc.RpcError as error:
            transfer.error = f"{error.code().name}: {error.details()}"
        except Exception as error:  # more bytes than requested, or a bug: never DONE
            transfer.error = str(error) or repr(error)
        else:
            if writer.missing_bytes:
                transfer.error = f"{writer.missing_bytes} bytes are missing"
            seconds = self._clock.monotonic() - began
            self._meter.record(transfer.peer.endpoint.owner, transfer.size_bytes, seconds)

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serve a call of a peer: read its only request, a list of ranges, and yield the bytes of
        these ranges in order."""
        assert self._region is not None
        try:
            spans = _unpack(next(requests, b""), self._generation, self._region.size_bytes)
        except Invalid as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        yield from _messages(self._region.address, spans, self._copies)


def _messages(
    address: int, spans: Sequence[tuple[int, int]], copies: MemoryCopier
) -> Iterator[bytes]:
    """Yield the bytes of the ranges in order, in messages of MESSAGE_BYTES; the last one may be
    shorter. A message may begin and end in the middle of a range."""
    parts: list[bytes] = []
    free = MESSAGE_BYTES
    for offset, size in spans:
        end = offset + size
        while offset < end:
            length = min(free, end - offset)
            parts.append(copies.read(address + offset, length))
            offset, free = offset + length, free - length
            if free == 0:
                yield b"".join(parts)
                parts, free = [], MESSAGE_BYTES
    if parts:
        yield b"".join(parts)


class _RangeWriter:
    """Writes the bytes of a sequence of messages into ranges, one after the other."""

    def __init__(self, address: int, spans: Sequence[TransferRange], copies: MemoryCopier) -> None:
        self._copies = copies
        self._targets = [(address + span.local_offset, span.size_bytes) for span in spans]
        self._targets.reverse()

    @property
    def missing_bytes(self) -> int:
        return sum(size for _, size in self._targets)

    def write(self, message: bytes) -> None:
        """Write the next bytes. Raises Invalid for more bytes than were requested."""
        source = ctypes.cast(ctypes.c_char_p(message), ctypes.c_void_p).value or 0
        start = 0
        while start < len(message):
            if not self._targets:
                raise Invalid("the peer sent more bytes than were requested")
            target, size = self._targets.pop()
            length = min(size, len(message) - start)
            self._copies.write(target, source + start, length)
            if length < size:
                self._targets.append((target + length, size - length))
            start += length


class _AuthenticatedHandler(grpc.GenericRpcHandler):
    """If the cluster has a secret, serves only calls that are signed with it; otherwise serves all
    calls. A call without a valid signature is rejected before its request is read, and does not
    occupy a serving thread."""

    def __init__(
        self,
        serve: Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]],
        checker: CallVerifier | None,
    ) -> None:
        self._handler: Any = grpc.stream_stream_rpc_method_handler(serve)
        self._checker = checker
        self._refusing = ThreadPoolExecutor(1, thread_name_prefix="kv-refuse")

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if handler_call_details.method != PATH:
            return None
        if self._checker is None:
            return self._handler
        metadata: Any = handler_call_details.invocation_metadata
        reason = self._checker.refusal(PATH, metadata)
        return self._refusal(reason) if reason else self._handler

    def _refusal(self, reason: str) -> Any:
        def refuse(_requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

        # gRPC runs a handler with this attribute in the handler's own thread pool.
        refuse.experimental_thread_pool = self._refusing  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(refuse)


def _open(endpoint: Endpoint, trust: ClusterCredentials, clock: Clock) -> GrpcPeer:
    """Open a gRPC channel to a peer. Raises Invalid if the endpoint is malformed, or if this
    process's certificates can't be read."""
    try:
        address = endpoint.metadata.decode("ascii")
    except UnicodeDecodeError as error:
        raise Invalid(
            "malformed grpc endpoint: its metadata must be host:port in ASCII characters"
        ) from error
    if trust.has_tls:
        options = (*_OPTIONS, ("grpc.ssl_target_name_override", TLS_NAME))
        channel = grpc.secure_channel(address, channel_credentials(trust), options=options)
    else:
        channel = grpc.insecure_channel(address, options=_OPTIONS)
    read: Any = channel.unary_stream(PATH)
    signer = CallSigner(trust.secret, address, clock) if trust.secret else None
    return GrpcPeer(endpoint, channel, read, signer)


def _pack(generation: int, spans: Sequence[TransferRange]) -> bytes:
    parts = [_HEADER.pack(generation, len(spans))]
    parts += [_SPAN.pack(span.remote_offset, span.size_bytes) for span in spans]
    return b"".join(parts)


def _unpack(request: bytes, generation: int, region_size_bytes: int) -> list[tuple[int, int]]:
    if len(request) < _HEADER.size or (len(request) - _HEADER.size) % _SPAN.size:
        raise Invalid(
            f"the read request has {len(request)} bytes; it must have a header of {_HEADER.size} "
            f"bytes, then {_SPAN.size} bytes per range"
        )
    wanted, count = _HEADER.unpack_from(request)
    if wanted != generation:
        raise Invalid(
            "the region's owner has restarted since the reader connected: the reader expects "
            f"generation {wanted}, but the owner's generation is now {generation}"
        )
    spans = list(_SPAN.iter_unpack(request[_HEADER.size :]))
    if len(spans) != count:
        raise Invalid(
            f"the header of the read request announces {count} ranges, but {len(spans)} follow"
        )
    if any(offset + size > region_size_bytes for offset, size in spans):
        raise Invalid("a range lies outside the region")
    if sum(size for _, size in spans) > region_size_bytes:
        raise Invalid("the ranges are larger in total than the region")
    return spans
