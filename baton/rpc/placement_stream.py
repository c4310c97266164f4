"""A router's stream to a conductor: many questions at a time, one message for all that wait.

A call of its own for each placement costs the router several times as much.
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
"""Questions without an answer, some kilobytes each; a conductor that leaves so many is gone."""

BATCH_BYTES = 4 * 1024 * 1024
"""Of questions in one message, and one more: a question of a million tokens has 1 MB of keys, and a
message at most 16."""

CONNECT_SECONDS = 2.0

PlacementFuture = asyncio.Future[Placement]

log = structlog.get_logger(__name__)


class PlacementStream(ABC):
    """:meth:`ask` while :meth:`run` runs; once that has ended, it is dead."""

    def __init__(self) -> None:
        self._unsent: deque[tuple[pb.PlaceRequest, PlacementFuture]] = deque()
        self._sent: deque[list[PlacementFuture]] = deque()
        self._num_open = 0  # neither answered nor given up with the stream
        self.alive = True

    @abstractmethod
    async def converse(self) -> None:
        """Carries questions and answers until the stream is over. Raises what ends it."""

    @abstractmethod
    def wake(self) -> None:
        """There is something to send."""

    async def run(self) -> None:
        """Returns when the stream is over, whatever ended it."""
        failure: BatonError = Unavailable("the stream ended")
        try:
            await self.converse()
        except BatonError as error:
            failure = error
        except Exception:  # a bug: this stream ends, and nothing else does
            log.exception("placement_stream_crashed")
        finally:
            self._end(failure)

    async def ask(self, request: pb.PlaceRequest, seconds: float) -> Placement:
        """Raises what the conductor does, DeadlineExceeded, Unavailable when the stream breaks."""
        if not self.alive:
            raise Unavailable("the stream has ended")
        if self._num_open >= MAX_WAITING:
            raise Unavailable("the conductor leaves too much unanswered")
        loop = asyncio.get_running_loop()
        answer: PlacementFuture = loop.create_future()
        timer = loop.call_later(seconds, _expire, answer)
        self._num_open += 1
        self._unsent.append((request, answer))
        self.wake()
        try:
            return await answer
        finally:
            timer.cancel()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def next_batch(self) -> pb.PlaceRequests:
        """What is to be sent, in one message; only while there is something."""
        batch, size = pb.PlaceRequests(), 0
        answers: list[PlacementFuture] = []
        while self._unsent and size < BATCH_BYTES:
            request, answer = self._unsent.popleft()
            batch.requests.append(request)
            answers.append(answer)
            size += request.ByteSize()
        self._sent.append(answers)
        return batch

    def settle(self, message: pb.PlaceAnswers) -> None:
        """Raises Unavailable for answers that nobody asked for."""
        answers = self._sent[0] if self._sent else []
        if len(answers) != len(message.answers) or not answers:
            raise Unavailable("the conductor answered what it was not asked")
        self._sent.popleft()
        self._num_open -= len(answers)
        for answer, told in zip(answers, message.answers, strict=True):
            if answer.done():
                continue  # nobody waits any more
            try:
                answer.set_result(place_answer_from_proto(told))
            except BatonError as error:
                answer.set_exception(error)
            except Exception as error:  # this answer's own end, and not that of the others
                flaw = Unavailable(f"an answer can't be read: {type(error).__name__} {error}")
                log.warning("placement_unreadable", error=str(flaw))
                answer.set_exception(flaw)

    def _end(self, failure: BatonError) -> None:
        self.alive = False
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
        self._something = asyncio.Event()

    async def converse(self) -> None:
        call = pb_grpc.ConductorStub(self._channel).PlaceMany(self._batches())
        try:
            with translated_rpc_errors():
                async for message in call:
                    self.settle(message)
        finally:
            call.cancel()

    def wake(self) -> None:
        self._something.set()

    async def _batches(self) -> AsyncIterator[pb.PlaceRequests]:
        while True:
            await self._something.wait()
            batch = self.next_batch()
            if not self.has_unsent:
                self._something.clear()
            yield batch


class FramedPlacementStream(PlacementStream):
    """What is asked in one turn of the event loop goes out together."""

    def __init__(self, address: str, trust: ClusterCredentials) -> None:
        super().__init__()
        self._address = address
        self._trust = trust
        self._line: FramedClientConnection | None = None
        self.reached = False
        self._is_due = False

    async def converse(self) -> None:
        line = await open_framed_connection(
            self._address, CONDUCTOR_SERVICE, self._trust, self._receive, CONNECT_SECONDS
        )
        self._line, self.reached = line, True
        try:
            self._flush()
            raise await line.ended()
        finally:
            line.close()

    def wake(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        while self._line is not None and self.has_unsent:
            self._line.send_message(self.next_batch().SerializeToString())

    def _receive(self, payload: bytes) -> None:
        self.settle(parse_message(pb.PlaceAnswers, payload))


def _expire(answer: PlacementFuture) -> None:
    if not answer.done():
        answer.set_exception(DeadlineExceeded("the conductor does not answer"))
