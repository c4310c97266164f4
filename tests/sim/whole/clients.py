"""What clients ask over HTTP, and what they get."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httptools
import orjson

from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import FinishReason, RequestOutput, RequestSpec, SamplingParams
from router.generation.generation import Generation
from tests.sim.whole.chance import Chance
from tests.sim.whole.process import Process
from tests.sim.whole.sockets import SimSocket

if TYPE_CHECKING:
    from tests.sim.whole.router import RouterLife

NUM_FAMILIES = 3
"""Prompts of a family begin alike."""

FIRST_CHARACTER = 0x100
"""The letter of token 0."""

SLOW_PAUSE_SECONDS = 0.3
REQUEST = (
    b"POST /%s HTTP/1.1\r\nhost: sim\r\ncontent-type: application/json\r\n"
    b"content-length: 2\r\n\r\n{}"
)
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Ask:
    """``leaves_after`` seconds the client is gone, if the answer has not ended. After
    ``stops_after`` it reads nothing for ``stops_for``. A ``slow`` one pauses now and then."""

    spec: RequestSpec
    at_seconds: float
    leaves_after: float | None = None
    streams: bool = True
    has_stop_string: bool = False
    slow: bool = False
    stops_after: float | None = None
    stops_for: float = 0.0


class WrongHistory(AssertionError):
    """A client saw what none may see."""


@dataclass(eq=False)
class Answer:
    """What one client saw. ``end`` is complete, error, cancelled, broken (its connection), or lost
    with its router; there is exactly one. ``num_noted`` tokens has its journey taken for the next.
    """

    ask: Ask
    journey: Generation | None = None
    tokens: list[TokenId] = field(default_factory=list)
    end: str = ""
    reason: FinishReason | None = None
    error: str = ""
    num_noted: int = 0
    has_ended: bool = False
    may_break: bool = False

    def note(self, output: RequestOutput) -> None:
        """In the router."""
        assert self.journey is not None
        name, epoch = self.ask.spec.request_id, self.journey.record.placements[-1].epoch
        if self.has_ended:
            raise WrongHistory(f"{name}: a token after the end")
        if output.epoch != epoch:
            raise WrongHistory(f"{name}: a token of epoch {output.epoch} in epoch {epoch}")
        if output.first_index != self.num_noted:
            raise WrongHistory(f"{name}: token {output.first_index} after {self.num_noted}")
        self.num_noted += len(output.token_ids)
        self.has_ended = output.finish_reason is not None

    def take(self, text: str, reason: str | None) -> None:
        """At the client."""
        if self.end or self.reason is not None:
            raise WrongHistory(f"{self.ask.spec.request_id}: text after the end")
        self.tokens += [TokenId(ord(letter) - FIRST_CHARACTER) for letter in text]
        if reason is not None:
            self.reason = FinishReason(reason)

    def finish(self, end: str, error: str = "") -> None:
        if self.end:
            raise WrongHistory(f"{self.ask.spec.request_id}: {end} after {self.end}")
        self.end, self.error = end, error


class Client(asyncio.Protocol):
    """Reads its answer as an HTTP client does. Over with ``over``."""

    def __init__(self, router: "RouterLife", answer: Answer, process: Process) -> None:
        self.answer = answer
        self.over: asyncio.Future[None] = process.loop.create_future()
        self._router = router
        self._process = process
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._unread = b""
        self._is_done = False

    # -- the transport calls ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.write(REQUEST % self.answer.ask.spec.request_id.encode())
        ask = self.answer.ask
        if ask.stops_after is not None:
            self._later(ask.stops_after, self._pause, ask.stops_for)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        chance = self._process.network.chance
        if self.answer.ask.slow and chance.happens(0.3):
            self._pause(SLOW_PAUSE_SECONDS * chance.number())

    def connection_lost(self, error: Exception | None) -> None:
        if not self.answer.end:
            end = "broken" if self._router.process.alive else "lost"
            self.answer.finish(end, f"the connection broke: {error}")
        self._end()

    # -- the parser calls --------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        self._unread += body
        if self._parser.get_status_code() != 200 or not self.answer.ask.streams:
            return
        *events, self._unread = self._unread.split(b"\n\n")
        for event in events:
            self._on_event(event.removeprefix(b"data: "))

    def on_message_complete(self) -> None:
        if self.answer.end:
            pass
        elif self._parser.get_status_code() != 200:
            self._fail(orjson.loads(self._unread))
        elif self.answer.ask.streams:
            if not self._is_done:
                raise WrongHistory(f"{self.answer.ask.spec.request_id}: half a stream")
            self.answer.finish("complete")
        else:
            self._on_choice(orjson.loads(self._unread))
            self.answer.finish("complete")
        self._transport.close()
        self._end()

    def _on_event(self, data: bytes) -> None:
        if self._is_done or self.answer.end:
            raise WrongHistory(f"{self.answer.ask.spec.request_id}: an event after the end")
        if data == DONE:
            self._is_done = True
            return
        event = orjson.loads(data)
        if "error" in event:
            self._fail(event)
        else:
            self._on_choice(event)

    def _on_choice(self, event: dict[str, Any]) -> None:
        choice = event["choices"][0]
        self.answer.take(choice["text"], choice["finish_reason"])

    def _fail(self, event: dict[str, Any]) -> None:
        self.answer.finish("error", event["error"]["message"])

    # -- what it does -----------------------------------------------------------------------

    def leave(self) -> None:
        if not self.answer.end:
            self.answer.finish("cancelled")
        if self._transport is not None:
            self._transport.abort()
        self._end()

    def _pause(self, seconds: float) -> None:
        self._transport.pause_reading()
        self._later(seconds, self._transport.resume_reading)

    def _later(self, seconds: float, what: Any, *given: Any) -> None:
        process = self._process
        process.loop.call_later(seconds, what, *given, context=process.context)

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def follow(router: "RouterLife", answer: Answer, process: Process) -> None:
    """One client, in a process of theirs."""
    client = Client(router, answer, process)
    try:
        await process.network.connect(process, lambda: client, router.address, "http")
        await client.over
    except OSError as error:
        if router.process.alive:
            raise WrongHistory(f"nobody listens: {error}") from error
        answer.finish("lost", str(error))
    except asyncio.CancelledError:
        client.leave()
        raise


def has_client(end: SimSocket) -> bool:
    """Whether its client knows already that it is connected."""
    return (end if end.is_client else end.peer).protocol is not None


def hang_up(end: SimSocket) -> None:
    """Breaks a client's connection, which it may tell."""
    client = end if end.is_client else end.peer
    client.protocol.answer.may_break = True
    for each in (end, end.peer):
        each.reset(ConnectionResetError("reset"))


def draw_asks(chance: Chance) -> list[Ask]:
    return [draw_ask(chance, number) for number in range(chance.between(3, 8))]


def draw_ask(chance: Chance, number: int) -> Ask:
    family, shared = chance.below(NUM_FAMILIES), 4 * chance.below(8)
    own = chance.between(1, 12)
    prompt = [*_tokens(family, shared), *_tokens(50 + number, own)]
    spec = RequestSpec(
        RequestId(f"r{number}"),
        Epoch(1),
        tuple(prompt),
        len(prompt),
        _draw_sampling(chance),
        tenant_salt=b"salt" if chance.happens(0.1) else b"",
    )
    leaves = chance.number() ** 2 if chance.happens(0.15) else None
    stops = chance.number() if chance.happens(0.08) else None
    return Ask(
        spec,
        0.05 + chance.number(),
        leaves,
        streams=chance.happens(0.85),
        has_stop_string=chance.happens(0.1),
        slow=chance.happens(0.2),
        stops_after=stops,
        stops_for=chance.number() ** 2 + (4.0 if chance.happens(0.15) else 0.0),
    )


def _draw_sampling(chance: Chance) -> SamplingParams:
    seeded = chance.happens(0.4)
    return SamplingParams(
        max_tokens=chance.between(1, 30),
        temperature=1.0 if seeded else 0.0,
        seed=chance.below(1000) if seeded else 0,
        presence_penalty=0.5 if chance.happens(0.1) else 0.0,
        stop_token_ids=tuple(TokenId(chance.below(256)) for _ in range(chance.below(4))),
    )


def _tokens(first: int, count: int) -> list[TokenId]:
    return [TokenId((first + 7 * position) % 251) for position in range(count)]
