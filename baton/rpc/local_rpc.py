"""Local RPC carries a store node's calls over a Unix socket, which takes a fraction of gRPC's time.

A frame's number identifies the call, its kind is the method or the status, and its payload is a
message of ``kvstore.proto``. Calls of one connection run concurrently and are answered as they end.
Only processes of the same user can connect: the socket's folder is closed to other users, and the
node closes the connections of their processes.
"""

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path

from google.protobuf.message import DecodeError, Message

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    Invalid,
    Overloaded,
    Unavailable,
)
from baton.network.listeners import FILE_PERMISSIONS, announce_listener
from baton.rpc.convert.error import error_fields, error_from_proto
from baton.rpc.frames import FrameProtocol
from baton.rpc.kvstore_methods import LOCAL_RPC_METHODS, KvStoreMethods
from baton.rpc.v1 import kvstore_pb2 as pb
from baton.system.peer_user import is_same_user
from baton.system.private_folder import MAX_SOCKET_PATH_BYTES, create_private_folder
from baton.system.unix_socket import listen_privately

MAX_CALLS = 256
"""Maximum number of concurrent calls on one connection."""

NOTIFICATION, MAX_CALL_NUMBER = 0, (1 << 32) - 1
"""A call with number NOTIFICATION (0) is not answered."""

_OK, _ERROR = 0, 255
_NUMBERS = {request: number for number, (request, _, _) in enumerate(LOCAL_RPC_METHODS)}


def local_rpc_socket_path(folder: Path, name: str) -> Path | None:
    """Return the path of a socket in ``folder``, which is created for this user alone. Return None
    if the path would be too long, or if the folder can't be created, belongs to another user or is
    open to other users."""
    path = folder / f"{name}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        return None
    return path if create_private_folder(folder) else None


class LocalRpcServer:
    """Serves ``methods`` at the socket ``path`` until closed."""

    def __init__(self, methods: KvStoreMethods, path: Path) -> None:
        self._methods = methods
        self._path = path
        self._server: asyncio.Server | None = None
        self._connections: set[_LocalRpcConnection] = set()

    async def start(self) -> None:
        """Start to listen. Raises Unavailable if that fails."""
        listener = listen_privately(self._path)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._new_connection, sock=listener)
        announce_listener("local_rpc", str(self._path), FILE_PERMISSIONS)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for connection in list(self._connections):
                connection.close()
            self._path.unlink(missing_ok=True)

    def _new_connection(self) -> "_LocalRpcConnection":
        return _LocalRpcConnection(self._methods, self._connections)


class _LocalRpcConnection(FrameProtocol):
    """The node's side of one client's connection."""

    def __init__(self, calls: KvStoreMethods, connections: "set[_LocalRpcConnection]") -> None:
        super().__init__()
        self._calls = calls
        self._connections = connections
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.add(self)
        if not is_same_user(transport.get_extra_info("socket"), os.getuid()):
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        for call, code, payload in self.split_frames(data):
            self._on_call(call, code, payload)

    def _on_call(self, call: int, code: int, payload: bytes) -> None:
        """Run a call: at once if it never blocks, otherwise in a task."""
        try:
            name, request = _parse(code, payload)
            response = self._calls.call_inline(name, request)
            if response is None and len(self._tasks) >= MAX_CALLS:
                raise Overloaded(
                    f"this connection already has {MAX_CALLS} calls in progress, the maximum"
                )
        except BatonError as error:
            self._refuse(call, error)
            return
        if response is not None:
            self._answer(call, _OK, response.SerializeToString())
            return
        task = asyncio.create_task(self._run(call, getattr(self._calls, name)(request)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, call: int, answering: Awaitable[Message]) -> None:
        try:
            response = await answering
        except BatonError as error:
            self._refuse(call, error)
        except Exception as error:
            self._answer(
                call,
                _ERROR,
                pb.LocalRpcError(
                    **error_fields(BatonError(f"internal error: {error!r}"))
                ).SerializeToString(),
            )
            raise
        else:
            self._answer(call, _OK, response.SerializeToString())

    def _refuse(self, call: int, error: BatonError) -> None:
        self._answer(call, _ERROR, pb.LocalRpcError(**error_fields(error)).SerializeToString())

    def _answer(self, call: int, code: int, payload: bytes) -> None:
        if call != NOTIFICATION:
            self.send(call, code, payload)


class LocalRpcClient(FrameProtocol):
    """The client's side of a connection. :meth:`connect` opens it; it is usable until ``is_closed``
    is True."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[int, tuple[asyncio.Future[Message], type[Message]]] = {}
        self._num_calls = 0
        self.is_closed = False

    @classmethod
    async def connect(cls, path: str) -> "LocalRpcClient":
        """Connect to the socket ``path``. Raises Unavailable."""
        loop = asyncio.get_running_loop()
        try:
            _, client = await loop.create_unix_connection(cls, path)
        except OSError as error:
            raise Unavailable(f"can't connect to {path}: {error}") from error
        return client

    async def call(self, request: Message, timeout_seconds: float) -> Message:
        """Make a call. Raises the store node's errors, Unavailable when the node has disconnected,
        and DeadlineExceeded."""
        if self.is_closed:
            raise Unavailable("the store node has disconnected")
        number = _NUMBERS[type(request)]
        self._num_calls = self._num_calls % MAX_CALL_NUMBER + 1
        call = self._num_calls
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Message] = loop.create_future()
        self._waiting[call] = (future, LOCAL_RPC_METHODS[number][1])
        self.send(call, number, request.SerializeToString())
        timer = loop.call_later(timeout_seconds, _time_out, future, timeout_seconds)
        try:
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(call, None)

    def notify(self, request: Message) -> None:
        """Send a call without waiting for an answer. It is dropped if the node has disconnected."""
        self.send(NOTIFICATION, _NUMBERS[type(request)], request.SerializeToString())

    def data_received(self, data: bytes) -> None:
        for call, code, payload in self.split_frames(data):
            self._on_answer(call, code, payload)

    def _on_answer(self, call: int, code: int, payload: bytes) -> None:
        future, response_type = self._waiting.get(call, (None, None))
        if future is None or response_type is None or future.done():
            return
        try:
            if code == _OK:
                future.set_result(response_type.FromString(payload))
            else:
                future.set_exception(error_from_proto(pb.LocalRpcError.FromString(payload)))
        except DecodeError:
            future.set_exception(Unavailable("the store node sent a malformed answer"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(Unavailable("the store node has disconnected"))


def _time_out(future: "asyncio.Future[Message]", seconds: float) -> None:
    if not future.done():
        future.set_exception(
            DeadlineExceeded(f"the store node did not answer within {seconds:g} s")
        )


def _parse(code: int, payload: bytes) -> tuple[str, Message]:
    """Return the name of the method with number ``code``, and the request. Raises Invalid for an
    unknown method or a malformed request."""
    if code >= len(LOCAL_RPC_METHODS):
        last = len(LOCAL_RPC_METHODS) - 1
        raise Invalid(f"unknown method number {code}; the known numbers are 0 to {last}")
    request_type, _, name = LOCAL_RPC_METHODS[code]
    try:
        return name, request_type.FromString(payload)
    except DecodeError as error:
        raise Invalid(f"the received request is a malformed {request_type.__name__}") from error
