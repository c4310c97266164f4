"""A router's stream of placement requests to a conductor. All requests that wait to be sent go into
one message.

A separate call for each placement would cost the router several times as much.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator

import grpc.aio
import structlog

from baton.core.credentials import ClusterCredentials
from baton.core.placement import Placement
from baton.errors import BatonError, DeadlineExceeded, Unavailable
from baton.rpc.channel import translated_rpc_errors
from baton.rpc.convert.placement import place_answer_from_proto
from baton.rpc.framed.client import FramedClientConnection, open_framed_connection
from baton.rpc.framed.conductor_service import CONDUCTOR_SERVICE
from baton.rpc.framed.connection import parse_message
from baton.rpc.v1 import conductor_pb2 as pb
from baton.rpc.v1 import conductor_pb2_grpc as pb_grpc

MAX_WAITING = 16_384
"""Maximum number of unanswered requests, some kilobytes each. A conductor that leaves this many
unanswered is considered dead."""

BATCH_BYTES = 4 * 1024 * 1024
"""Once a message has this many bytes of requests, no more are added. A request of a million tokens
has 1 MB of keys, and a message may have 16 MB."""

CONNECT_SECONDS = 2.0

STREAM_ENDED = "the stream of placement requests to the conductor has ended"

PlacementFuture = asyncio.Future[Placement]

log = structlog.get_logger(__name__)


class PlacementStream(ABC):
    """A router's stream of placement requests. :meth:`request_placement` can be called while
    :meth:`run` runs. When :meth:`run` returns, the stream has ended and can't be used again."""

    def __init__(self) -> None:
        self._unsent: deque[tuple[pb.PlaceRequest, PlacementFuture]] = deque()
        self._sent: deque[list[PlacementFuture]] = deque()
        self._num_open = 0  # unanswered requests, including those that nobody waits for any more
        self.is_alive = True

    @abstractmethod
    async def exchange(self) -> None:
        """Send requests and receive answers until the stream ends. Raises the error that ends
        it."""

    @abstractmethod
    def notify_unsent(self) -> None:
        """Notify the stream that a request waits to be sent."""

    async def run(self) -> None:
        """Run the stream until it ends. An error that ends it is not raised here, but by the calls
        of :meth:`request_placement` that wait for an answer."""
        failure: BatonError = Unavailable(STREAM_ENDED)
        try:
            await self.exchange()
        except BatonError as error:
            failure = error
        except Exception:  # a bug, which must end only this stream
            log.exception("placement_stream_crashed")
        finally:
            self._end(failure)

    async def request_placement(self, request: pb.PlaceRequest, seconds: float) -> Placement:
        """Request a placement. Raises the conductor's errors, DeadlineExceeded, and Unavailable
        when the stream breaks."""
        if not self.is_alive:
            raise Unavailable(STREAM_ENDED)
        if self._num_open >= MAX_WAITING:
            raise Unavailable(
                f"{MAX_WAITING} placement requests to the conductor are unanswered, which is the "
                "maximum"
            )
        loop = asyncio.get_running_loop()
        answer: PlacementFuture = loop.create_future()
        timer = loop.call_later(seconds, _expire, answer)
        self._num_open += 1
        self._unsent.append((request, answer))
        self.notify_unsent()
        try:
            return await answer
        finally:
            timer.cancel()
            # A refusal's traceback refers to this frame. Without ``del``, the frame would refer to
            # the refusal, and only the garbage collector could free this cycle and the request.
            del answer

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def next_batch(self) -> pb.PlaceRequests:
        """Return the requests that wait to be sent, oldest first, as one message: all of them, or
        as many as make up ``BATCH_BYTES``. Call it only while :attr:`has_unsent`."""
        batch, size = pb.PlaceRequests(), 0
        answers: list[PlacementFuture] = []
        while self._unsent and size < BATCH_BYTES:
            request, answer = self._unsent.popleft()
            batch.requests.append(request)
            answers.append(answer)
            size += request.ByteSize()
        self._sent.append(answers)
        return batch

    def deliver_answers(self, message: pb.PlaceAnswers) -> None:
        """Deliver the answers to the oldest unanswered batch. Raises Unavailable if their number is
        not the batch's number of requests."""
        answers = self._sent[0] if self._sent else []
        if len(answers) != len(message.answers) or not answers:
            raise Unavailable(
                "the conductor's answers do not match the requests: it sent "
                f"{len(message.answers)} answers to {len(answers)} requests"
            )
        self._sent.popleft()
        self._num_open -= len(answers)
        for answer, proto in zip(answers, message.answers, strict=True):
            if answer.done():
                continue  # the caller has stopped waiting
            try:
                answer.set_result(place_answer_from_proto(proto))
            except BatonError as error:
                # The traceback refers to this frame, which refers to ``answer``: also a cycle.
                answer.set_exception(error.with_traceback(None))
            except Exception as error:  # fails this placement only
                flaw = Unavailable(
                    f"the conductor's answer can't be decoded: {type(error).__name__}: {error}"
                )
                log.warning("placement_unreadable", error=str(flaw))
                answer.set_exception(flaw)

    def _end(self, failure: BatonError) -> None:
        self.is_alive = False
        waiting = [answer for answers in self._sent for answer in answers]
        waiting += [answer for _, answer in self._unsent]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(type(failure)(str(failure)))
        self._sent.clear()
        self._unsent.clear()


class GrpcPlacementStream(PlacementStream):
    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__()
        self._channel = channel
        self._has_unsent_event = asyncio.Event()

    async def exchange(self) -> None:
        call = pb_grpc.ConductorStub(self._channel).PlaceMany(self._batches())
        try:
            with translated_rpc_errors():
                async for message in call:
                    self.deliver_answers(message)
        finally:
            call.cancel()

    def notify_unsent(self) -> None:
        self._has_unsent_event.set()

    async def _batches(self) -> AsyncIterator[pb.PlaceRequests]:
        while True:
            await self._has_unsent_event.wait()
            batch = self.next_batch()
            if not self.has_unsent:
                self._has_unsent_event.clear()
            yield batch


class FramedPlacementStream(PlacementStream):
    """Placements over a framed connection. All requests made in one iteration of the event loop are
    sent together."""

    def __init__(self, address: str, trust: ClusterCredentials) -> None:
        super().__init__()
        self._address = address
        self._trust = trust
        self._connection: FramedClientConnection | None = None
        self.was_connected = False
        self._is_flush_scheduled = False

    async def exchange(self) -> None:
        connection = await open_framed_connection(
            self._address, CONDUCTOR_SERVICE, self._trust, self._receive, CONNECT_SECONDS
        )
        self._connection, self.was_connected = connection, True
        try:
            self._flush()
            raise await connection.wait_until_ended()
        finally:
            connection.close()

    def notify_unsent(self) -> None:
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        while self._connection is not None and self.has_unsent:
            self._connection.send_message(self.next_batch().SerializeToString())

    def _receive(self, payload: bytes) -> None:
        self.deliver_answers(parse_message(pb.PlaceAnswers, payload))


def _expire(answer: PlacementFuture) -> None:
    if not answer.done():
        answer.set_exception(DeadlineExceeded("the conductor did not answer in time"))
