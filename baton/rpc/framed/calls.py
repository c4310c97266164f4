"""Calls over framed connections: unary methods of a service, without the cost of gRPC.

The number of a frame identifies the call, and its kind is FIRST_METHOD plus the number of the
method, ANSWER or ERROR. Calls of one connection run concurrently and are answered as they end.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog
from google.protobuf.message import DecodeError, Message

from baton.core.credentials import ClusterCredentials
from baton.errors import BatonError, DeadlineExceeded, Invalid, Overloaded, Unavailable
from baton.rpc.convert.error import error_from_proto, error_to_proto
from baton.rpc.framed.client import FramedClientConnection, connect
from baton.rpc.framed.connection import FIRST_METHOD, FramedConnection, FrameKind, parse_message
from baton.rpc.framed.server import FramedServiceFactory
from baton.rpc.service import Service
from baton.rpc.v1 import conductor_pb2 as pb

MAX_CALLS = 256
"""Maximum number of calls of one connection that wait for something in the server."""

MAX_WAITING = 16_384
"""Maximum number of unanswered calls of a client, some kilobytes each. A server that leaves this
many unanswered is considered dead."""

NOTIFICATION, MAX_CALL_NUMBER = 0, (1 << 32) - 1
"""A call with number NOTIFICATION (0) is not answered."""

CONNECT_SECONDS = 2.0

Handler = Callable[[Any], Message | Coroutine[Any, Any, Message]]
"""Serves one method. A handler that need not wait returns the response itself."""

log = structlog.get_logger(__name__)


def call_services(service: Service, handlers: object) -> dict[str, FramedServiceFactory]:
    """Return ``service`` for a FramedServer, with those of its unary methods that ``handlers``
    has."""
    table = {
        method.number: (method.request_type, getattr(handlers, method.handler))
        for method in service.methods.values()
        if method.is_unary and hasattr(handlers, method.handler)
    }
    return {service.name: partial(CallServer, table)}


class CallServer:
    """Serves the calls of one client. They are cancelled when its connection ends."""

    def __init__(
        self, table: dict[int, tuple[type[Message], Handler]], connection: FramedConnection
    ) -> None:
        self._table = table
        self._connection = connection
        self._tasks: set[asyncio.Task[None]] = set()
        connection.handle_call = self._on_call

    def on_message(self, payload: bytes) -> None:
        _refuse_message(payload)

    def on_lost(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _on_call(self, call: int, kind: int, payload: bytes) -> None:
        """Run a call: at once if its handler does not wait, otherwise in a task."""
        request_type, handler = self._table.get(kind - FIRST_METHOD, (None, None))
        try:
            if request_type is None or handler is None:
                raise Invalid(f"the service has no method with number {kind - FIRST_METHOD}")
            response = handler(parse_message(request_type, payload))
            if isinstance(response, Message):
                self._answer(call, FrameKind.ANSWER, response)
            elif len(self._tasks) >= MAX_CALLS:
                response.close()
                raise Overloaded(
                    f"this connection already has {MAX_CALLS} calls in progress, the maximum"
                )
            else:
                task = asyncio.create_task(self._run(call, response))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except Exception as error:
            self._refuse(call, error)

    async def _run(self, call: int, response: Coroutine[Any, Any, Message]) -> None:
        try:
            self._answer(call, FrameKind.ANSWER, await response)
        except Exception as error:
            self._refuse(call, error)

    def _refuse(self, call: int, error: Exception) -> None:
        if not isinstance(error, BatonError):  # a bug, which must fail only this call
            log.error("call_crashed", exc_info=error)
            error = BatonError(f"internal error: {error!r}")
        self._answer(call, FrameKind.ERROR, error_to_proto(error))

    def _answer(self, call: int, kind: int, response: Message) -> None:
        if call != NOTIFICATION:
            self._connection.send(call, kind, response.SerializeToString())


class CallConnection(FramedClientConnection):
    """The client's side of one connection for calls."""

    def __init__(self, service: str, secret: str | None, is_local: bool = False) -> None:
        super().__init__(service, secret, _refuse_message, is_local)
        self._waiting: dict[int, tuple[asyncio.Future[Message], type[Message]]] = {}
        self._num_calls = 0
        self.handle_call = self._on_answer

    def begin_call(self, response_type: type[Message]) -> tuple[int, "asyncio.Future[Message]"]:
        """Return the number of a new call, and the future of its answer. Raises Unavailable."""
        if self.has_ended:
            raise Unavailable("the connection has ended")
        if len(self._waiting) >= MAX_WAITING:
            raise Unavailable(f"{MAX_WAITING} calls are unanswered, which is the maximum")
        self._num_calls = number = self._num_calls % MAX_CALL_NUMBER + 1
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer, response_type
        return number, answer

    def end_call(self, number: int) -> None:
        self._waiting.pop(number, None)

    def _on_answer(self, number: int, kind: int, payload: bytes) -> None:
        answer, response_type = self._waiting.get(number, (None, None))
        if answer is None or response_type is None or answer.done():
            return  # the caller has stopped waiting
        try:
            if kind == FrameKind.ANSWER:
                answer.set_result(response_type.FromString(payload))
            elif kind == FrameKind.ERROR:
                answer.set_exception(error_from_proto(pb.Refusal.FromString(payload)))
            else:
                raise Invalid("a server makes no calls")
        except DecodeError:
            name = response_type.__name__
            answer.set_exception(Unavailable(f"the received answer is a malformed {name}"))

    def on_lost(self, failure: BatonError) -> None:
        super().on_lost(failure)
        for answer, _ in self._waiting.values():
            if not answer.done():
                answer.set_exception(type(failure)(str(failure)))


class CallClient:
    """Calls ``service`` at ``address``: host:port, or the path of a Unix socket. The connection is
    opened when it is needed; all calls share it."""

    def __init__(
        self, address: str, service: Service, trust: ClusterCredentials | None = None
    ) -> None:
        self._address = address
        self._service = service
        self._trust = trust or ClusterCredentials()
        self._connection: CallConnection | None = None
        self._opening: asyncio.Task[CallConnection] | None = None

    async def call(self, name: str, request: Message, timeout_seconds: float) -> Any:
        """Call a method, and return its response. Raises the server's errors, DeadlineExceeded, and
        Unavailable if the connection breaks or can't be opened."""
        connection = self._connection
        if connection is None or connection.has_ended:
            connection = await self.connect(timeout_seconds)
        method = self._service.methods[name]
        number, answer = connection.begin_call(method.response_type)
        connection.send(number, FIRST_METHOD + method.number, request.SerializeToString())
        loop = asyncio.get_running_loop()
        timer = loop.call_later(timeout_seconds, _expire, answer, timeout_seconds)
        try:
            return await answer
        finally:
            timer.cancel()
            connection.end_call(number)
            # An error's traceback refers to this frame. Without ``del``, the frame would refer to
            # the error, and only the garbage collector could free this cycle and the request.
            del answer

    def notify(self, name: str, request: Message) -> None:
        """Make a call without waiting for an answer, over the connection that is open. It is
        dropped if there is none."""
        if self._connection is None:
            return
        kind = FIRST_METHOD + self._service.methods[name].number
        self._connection.send(NOTIFICATION, kind, request.SerializeToString())

    async def connect(self, timeout_seconds: float) -> CallConnection:
        """Return the open connection, or open one: one attempt at a time, for all callers. Raises
        DeadlineExceeded, Unavailable."""
        if self._connection is not None and not self._connection.has_ended:
            return self._connection
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
            self._opening.add_done_callback(_retrieve)
        opening = self._opening
        await asyncio.wait([opening], timeout=timeout_seconds)
        if not opening.done():
            raise DeadlineExceeded(f"no connection to {self._address} within {timeout_seconds:g} s")
        if opening.cancelled():
            raise Unavailable("this client was closed")
        return opening.result()

    def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _open(self) -> CallConnection:
        try:
            factory = partial(CallConnection, self._service.name, self._trust.secret)
            self._connection = await connect(factory, self._address, self._trust, CONNECT_SECONDS)
            return self._connection
        finally:
            self._opening = None


def _retrieve(opening: asyncio.Task[CallConnection]) -> None:
    """Retrieve an error that no caller waits for any more, so that asyncio does not log it."""
    if not opening.cancelled():
        opening.exception()


def _refuse_message(payload: bytes) -> None:
    raise Invalid("this service has calls, and no messages")


def _expire(answer: "asyncio.Future[Message]", seconds: float) -> None:
    if not answer.done():
        answer.set_exception(DeadlineExceeded(f"there was no answer within {seconds:g} s"))
