"""Simulated HTTP clients, the requests that they send, and the responses that they receive."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httptools
import orjson

from baton.core.adapter import AdapterRef
from baton.core.attention_window import AttentionWindow
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import FinishReason, RequestOutput, RequestSpec, SamplingParams
from router.generation.generation import Generation
from tests.sim.whole.process import Process
from tests.sim.whole.seeded_random import SeededRandom
from tests.sim.whole.sockets import SimSocket

if TYPE_CHECKING:
    from tests.sim.whole.router import SimRouter

NUM_FAMILIES = 3
"""The number of prompt families. Prompts of one family share their beginning."""

ADAPTERS = [AdapterRef(name, name.encode() * 16) for name in "ab"]
"""The LoRA adapters that all workers have loaded."""

ATTENTION_WINDOWS = [AttentionWindow(*each) for each in ((0, 5), (4, 6), (3, 1), (8, 12))]
"""The attention windows of requests: shorter and longer than blocks and prompts."""

FIRST_CHARACTER = 0x100
"""The character for token 0."""

SLOW_PAUSE_SECONDS = 0.3
REQUEST = (
    b"POST /%s HTTP/1.1\r\nhost: sim\r\ncontent-type: application/json\r\n"
    b"content-length: 2\r\n\r\n{}"
)
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request and its client's behaviour. If ``cancels_after_seconds`` is not None, the client
    disconnects after this time, unless the response has ended by then. If ``pauses_after_seconds``
    is not None, the client stops reading after this time, for ``pause_seconds``. If
    ``reads_slowly`` is set, the client also makes short pauses at random, after reads."""

    spec: RequestSpec
    at_seconds: float
    cancels_after_seconds: float | None = None
    streams: bool = True
    has_stop_string: bool = False
    reads_slowly: bool = False
    pauses_after_seconds: float | None = None
    pause_seconds: float = 0.0


class GuaranteeViolation(AssertionError):
    """A client received something, or the router did something, that breaks one of Baton's
    guarantees."""


@dataclass(eq=False)
class ClientResponse:
    """The response that one client has received. ``end`` is set exactly once: to "complete",
    "error", "cancelled", "broken" (the connection broke) or "lost" (the router died).
    ``digests`` has the model's digest for each token that the router's :class:`Generation` has
    accepted."""

    request: ClientRequest
    generation: Generation | None = None
    tokens: list[TokenId] = field(default_factory=list)
    end: str = ""
    reason: FinishReason | None = None
    error: str = ""
    digests: list[str] = field(default_factory=list)
    has_ended: bool = False
    may_break: bool = False

    def check_output(self, output: RequestOutput) -> None:
        """Check and count an output that the router has accepted."""
        assert self.generation is not None
        name, epoch = self.request.spec.request_id, self.generation.record.placements[-1].epoch
        if self.has_ended:
            raise GuaranteeViolation(f"{name}: the router accepted an output after the last one")
        if output.epoch != epoch:
            raise GuaranteeViolation(
                f"{name}: the router accepted an output of epoch {output.epoch}; the current "
                f"epoch is {epoch}"
            )
        if output.first_index != len(self.digests):
            raise GuaranteeViolation(
                f"{name}: the router accepted an output that begins at token {output.first_index}; "
                f"it must begin at token {len(self.digests)}"
            )
        variant = self.generation.record.variant
        # None: the router knew no variant yet, and a conductor chose the worker.
        digest = "" if variant is None else variant.model_digest
        self.digests += [digest] * len(output.token_ids)
        self.has_ended = output.finish_reason is not None

    def receive(self, text: str, reason: str | None) -> None:
        """Record text that the client has received."""
        if self.end or self.reason is not None:
            raise GuaranteeViolation(
                f"{self.request.spec.request_id}: the client received text after the finish "
                "reason or after the response had ended"
            )
        self.tokens += [TokenId(ord(letter) - FIRST_CHARACTER) for letter in text]
        if reason is not None:
            self.reason = FinishReason(reason)

    def finish(self, end: str, error: str = "") -> None:
        if self.end:
            raise GuaranteeViolation(
                f"{self.request.spec.request_id}: the response ended twice, first as {self.end}, "
                f"then as {end}"
            )
        self.end, self.error = end, error


class Client(asyncio.Protocol):
    """An HTTP client that sends one request and reads its response. ``closed`` completes when the
    client has finished."""

    def __init__(self, router: "SimRouter", answer: ClientResponse, process: Process) -> None:
        self.answer = answer
        self.closed: asyncio.Future[None] = process.loop.create_future()
        self._router = router
        self._process = process
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._unread = b""
        self._is_done = False

    # -- callbacks of the transport ---------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.write(REQUEST % self.answer.request.spec.request_id.encode())
        ask = self.answer.request
        if ask.pauses_after_seconds is not None:
            self._later(ask.pauses_after_seconds, self._pause, ask.pause_seconds)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        chance = self._process.network.chance
        if self.answer.request.reads_slowly and chance.happens(0.3):
            self._pause(SLOW_PAUSE_SECONDS * chance.number())

    def connection_lost(self, error: Exception | None) -> None:
        if not self.answer.end:
            end = "broken" if self._router.process.alive else "lost"
            self.answer.finish(end, f"the connection broke: {error}")
        self._end()

    # -- callbacks of the HTTP parser ---------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        self._unread += body
        if self._parser.get_status_code() != 200 or not self.answer.request.streams:
            return
        *events, self._unread = self._unread.split(b"\n\n")
        for event in events:
            if not event.startswith(b":"):  # not a comment
                self._on_event(event.removeprefix(b"data: "))

    def on_message_complete(self) -> None:
        if self.answer.end:
            pass
        elif self._parser.get_status_code() != 200:
            self._fail(orjson.loads(self._unread))
        elif self.answer.request.streams:
            if not self._is_done:
                raise GuaranteeViolation(
                    f"{self.answer.request.spec.request_id}: the stream ended without [DONE]"
                )
            self.answer.finish("complete")
        else:
            self._on_choice(orjson.loads(self._unread))
            self.answer.finish("complete")
        self._transport.close()
        self._end()

    def _on_event(self, data: bytes) -> None:
        if self._is_done or self.answer.end:
            raise GuaranteeViolation(
                f"{self.answer.request.spec.request_id}: the client received an event after the "
                "response had ended"
            )
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
        self.answer.receive(choice["text"], choice["finish_reason"])

    def _fail(self, event: dict[str, Any]) -> None:
        self.answer.finish("error", event["error"]["message"])

    # -- actions ------------------------------------------------------------------------------

    def cancel(self) -> None:
        if not self.answer.end:
            self.answer.finish("cancelled")
        if self._transport is not None:
            self._transport.abort()
        self._end()

    def _pause(self, seconds: float) -> None:
        self._transport.pause_reading()
        self._later(seconds, self._transport.resume_reading)

    def _later(self, seconds: float, callback: Any, *arguments: Any) -> None:
        process = self._process
        process.loop.call_later(seconds, callback, *arguments, context=process.context)

    def _end(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def run_client(router: "SimRouter", answer: ClientResponse, process: Process) -> None:
    """Run one client until it has its response, has disconnected, or its connection breaks."""
    client = Client(router, answer, process)
    try:
        await process.network.connect(process, lambda: client, router.address, "http")
        await client.closed
    except OSError as error:
        if router.process.alive:
            raise GuaranteeViolation(f"the router does not accept connections: {error}") from error
        answer.finish("lost", str(error))
    except asyncio.CancelledError:
        client.cancel()
        raise


def has_client(end: SimSocket) -> bool:
    """Return whether the client of this HTTP connection knows that it is connected. Only then may
    :func:`reset_client_connection` be called."""
    return (end if end.is_client else end.peer).protocol is not None


def reset_client_connection(end: SimSocket) -> None:
    """Reset a client's connection, and allow the client's response to end as "broken"."""
    client = end if end.is_client else end.peer
    client.protocol.answer.may_break = True
    for each in (end, end.peer):
        each.reset(ConnectionResetError("reset"))


def draw_requests(chance: SeededRandom, *, with_windows: bool) -> list[ClientRequest]:
    """Draw the requests of a run; some have an attention window if ``with_windows`` is set."""
    return [
        draw_request(chance, number, with_windows=with_windows)
        for number in range(chance.between(3, 8))
    ]


def draw_request(chance: SeededRandom, number: int, *, with_windows: bool) -> ClientRequest:
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
        # Not drawn, so that a seed keeps its other draws: half of the requests use the base model.
        adapter=ADAPTERS[number % 4] if number % 4 < len(ADAPTERS) else None,
        attention_window=_window(chance.seed + number) if with_windows else None,
    )
    leaves = chance.number() ** 2 if chance.happens(0.15) else None
    stops = chance.number() if chance.happens(0.08) else None
    return ClientRequest(
        spec,
        0.05 + chance.number(),
        leaves,
        streams=chance.happens(0.85),
        has_stop_string=chance.happens(0.1),
        reads_slowly=chance.happens(0.2),
        pauses_after_seconds=stops,
        pause_seconds=chance.number() ** 2 + (4.0 if chance.happens(0.15) else 0.0),
    )


def _window(number: int) -> AttentionWindow | None:
    """Return the window for one request in three. It is not drawn, either."""
    return None if number % 3 else ATTENTION_WINDOWS[number // 3 % len(ATTENTION_WINDOWS)]


def _draw_sampling(chance: SeededRandom) -> SamplingParams:
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
