"""A router's stream to a conductor: many questions at a time, one message for all that wait.

A call of its own for each placement costs the router several times as much.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import grpc.aio

from baton.core.placement import Placement
from baton.errors import BatonError, DeadlineExceeded, Unavailable
from baton.rpc.channel import translated
from baton.rpc.placement_convert import answer_from_proto
from baton.rpc.v1 import conductor_pb2 as pb
from baton.rpc.v1 import conductor_pb2_grpc as pb_grpc

MAX_WAITING = 16_384
"""Questions without an answer, some kilobytes each; a conductor that leaves so many is gone."""

BATCH_BYTES = 4 * 1024 * 1024
"""Of questions in one message, and one more: a question of a million tokens has 1 MB of keys, and a
message at most 16."""

Answer = asyncio.Future[Placement]


class PlacementStream:
    """:meth:`ask` while :meth:`run` runs; once that has ended, it is dead."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._unsent: deque[tuple[pb.PlaceRequest, Answer]] = deque()
        self._sent: deque[list[Answer]] = deque()
        self._num_open = 0  # neither answered nor given up with the stream
        self._something = asyncio.Event()
        self.alive = True

    async def run(self) -> None:
        """Returns when the stream is over, whatever ended it."""
        failure: BatonError = Unavailable("the stream ended")
        call = pb_grpc.ConductorStub(self._channel).PlaceMany(self._batches())
        try:
            with translated():
                async for message in call:
                    self._settle(message)
        except BatonError as error:
            failure = error
        finally:
            call.cancel()
            self._end(failure)

    async def ask(self, request: pb.PlaceRequest, seconds: float) -> Placement:
        """Raises what the conductor does, DeadlineExceeded, Unavailable when the stream breaks."""
        if not self.alive:
            raise Unavailable("the stream has ended")
        if self._num_open >= MAX_WAITING:
            raise Unavailable("the conductor leaves too much unanswered")
        loop = asyncio.get_running_loop()
        answer: Answer = loop.create_future()
        timer = loop.call_later(seconds, _expire, answer)
        self._num_open += 1
        self._unsent.append((request, answer))
        self._something.set()
        try:
            return await answer
        finally:
            timer.cancel()

    async def _batches(self) -> AsyncIterator[pb.PlaceRequests]:
        while True:
            await self._something.wait()
            batch, size = pb.PlaceRequests(), 0
            answers: list[Answer] = []
            while self._unsent and size < BATCH_BYTES:
                request, answer = self._unsent.popleft()
                batch.requests.append(request)
                answers.append(answer)
                size += request.ByteSize()
            if not self._unsent:
                self._something.clear()
            self._sent.append(answers)
            yield batch

    def _settle(self, message: pb.PlaceAnswers) -> None:
        """Raises Unavailable for answers that nobody asked for."""
        answers = self._sent.popleft() if self._sent else []
        if len(answers) != len(message.answers):
            raise Unavailable("the conductor answered what it was not asked")
        self._num_open -= len(answers)
        for answer, told in zip(answers, message.answers, strict=True):
            if answer.done():
                continue  # nobody waits any more
            try:
                known = answer_from_proto(told)
            except Unavailable as error:
                known = error
            if isinstance(known, BatonError):
                answer.set_exception(known)
            else:
                answer.set_result(known)

    def _end(self, failure: BatonError) -> None:
        self.alive = False
        waiting = [answer for answers in self._sent for answer in answers]
        waiting += [answer for _, answer in self._unsent]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(type(failure)(str(failure)))
        self._sent.clear()
        self._unsent.clear()


def _expire(answer: Answer) -> None:
    if not answer.done():
        answer.set_exception(DeadlineExceeded("the conductor does not answer"))
