"""A router: its HTTP connections, answers, journeys, links, placers and its picture of the cluster.
What is left out stands before a journey: bodies, prompts and tenants."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from starlette.types import Receive, Scope, Send

from baton.core.ids import TenantId
from baton.core.request import RequestOutput
from baton.errors import BatonError, Invalid, Unauthorized
from baton.rpc.framed.connection import FramedConnection
from router.generation.attempt import TokenTimeouts
from router.generation.block_key_hasher import compute_block_keys
from router.generation.cluster import WORKER_ROLES, Cluster
from router.generation.conductor_placer import ConductorPlacer
from router.generation.generation import FailoverConfig, Generation, GenerationContext
from router.generation.output_queue import InlineConsumer
from router.generation.placement import FallbackPlacer
from router.generation.record import GenerationRecord
from router.generation.ring_placer import RingPlacer
from router.generation.worker_connection_pool import WorkerConnectionPool
from router.http.body_parser import parse_body
from router.http.connection import ConnectionLimits
from router.http.raw_body import BodyBudget, RawBody
from router.http.response_writer import (
    INLINE_WRITER_KEY,
    ResponseWriter,
    cancel_on_disconnect,
    read_body,
)
from router.http.server import HttpServer
from router.openai.choice_stream import ChoiceStream
from router.openai.context import RouterContext
from router.openai.encoders import ChoiceResult as Worded
from router.openai.encoders import CompletionEncoder, ResponseMetadata
from router.openai.offload_executor import OffloadExecutor
from router.openai.request_handler import CompletionHandler
from router.openai.schema import CompletionBody
from tests.sim.whole import peers
from tests.sim.whole.clients import FIRST_CHARACTER, Answer, WrongHistory
from tests.sim.whole.process import PROCESS, Process
from tests.sim.whole.registry import RegistryLink

if TYPE_CHECKING:
    from tests.sim.whole.worker import House

TENANT = TenantId("tenant")
JOURNEY = FailoverConfig(deadlines=TokenTimeouts(first_token=5.0, handoff=5.0, token_gap=1.5))
WRITE_SECONDS = 3.0
LIMITS = ConnectionLimits(write_seconds=WRITE_SECONDS)
MAX_UNSENT_BYTES = 16 * 1024
"""Instead of 32 MiB: messages are as much smaller here."""

SERVER_TICK_SECONDS = 1.0
"""Instead of 2: a router stands still for four seconds here, and no longer."""

BODY = parse_body(CompletionBody, b'{"prompt": "a", "stream": true}')
ENVELOPE = ResponseMetadata("cmpl-1", 1, "toy", return_token_ids=False, usage_chunk=False)
NEVER = "\x00"
"""A stop string that no answer has: text that looks for it goes the long way."""

IMPOSSIBLE = (" are missing", "malformed", "was not asked")
"""In the text of a failure: connections lose and change nothing, so nobody finds a gap or
nonsense."""


class Letters:
    """Implements :class:`baton.text.detokenizer.IncrementalDetokenizer`: a letter for a token."""

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(chr(FIRST_CHARACTER + token_id) for token_id in token_ids)

    def flush(self) -> str:
        return ""


class WatchedJourney(Generation):
    """Tells ``answer`` of each output that it takes for the next, by whichever way."""

    answer: Answer
    _is_over = False

    async def outputs(self, relay: InlineConsumer | None = None) -> AsyncGenerator[RequestOutput]:
        try:
            async with aclosing(super().outputs(relay)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._is_over = True

    def _relay(self, relay: InlineConsumer, output: RequestOutput) -> bool:
        if self._is_over:
            raise WrongHistory(f"{output.request_id}: a token is handed over after the end")
        return super()._relay(relay, output)

    def _note(self, output: RequestOutput) -> None:
        self.answer.note(output)
        super()._note(output)


class NoMetrics:
    """Nobody looks."""

    def __getattr__(self, name: str) -> "NoMetrics":
        return self

    def __call__(self, *given: Any) -> "NoMetrics":
        return self


VISIT = SimpleNamespace(tenant=SimpleNamespace(id=TENANT))
"""As much of :class:`router.tenants.admission.RequestAdmission`."""


class SimService:
    """As much of :class:`router.openai.context.RouterContext` as an exchange needs to answer."""

    follow_all = RouterContext.follow_all
    _follow = RouterContext._follow
    tracing = None
    metrics = NoMetrics()

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.bodies = BodyBudget(LIMITS.max_body_bytes)
        self.large_work = OffloadExecutor()


class SimExchange(CompletionHandler):
    """One request, named by its path: what it asks was prepared before."""

    def __init__(self, router: "RouterLife") -> None:
        super().__init__(router.service)  # type: ignore[arg-type]
        self._router = router
        self._visit = VISIT  # type: ignore[assignment]
        self._path = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._path = scope["path"]
        await super().__call__(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, wire: ResponseWriter) -> None:
        with self._router.service.bodies.body(TENANT, 1.0, shared=False) as raw:
            await read_body(scope, receive, raw, LIMITS.max_body_bytes, LIMITS.header_seconds)
            await cancel_on_disconnect(
                receive, self.answer(wire, raw, TENANT), scope.get(INLINE_WRITER_KEY)
            )

    async def answer(self, wire: ResponseWriter, raw: RawBody, tenant: TenantId) -> None:
        answer = self._router.house.answers[self._path.removeprefix("/")]
        choice = await self._router.choice(answer)
        worded = [Worded(0, answer.ask.spec.token_ids)]
        wording = CompletionEncoder(ENVELOPE, None, with_logprobs=False)  # type: ignore[arg-type]
        serve = self._stream if answer.ask.streams else self._whole
        await serve(wire, [choice], worded, wording, BODY)


class RouterLife:
    """Listens for clients at ``address``. Lines are its own; gRPC has twins, see :func:`wired`."""

    def __init__(self, house: "House", name: str, max_model_tokens: int) -> None:
        self.house = house
        self.process = Process(name, house.network)
        self.address = f"{name}:80"
        self._clock = house.clock
        self.cluster = Cluster(
            RegistryLink(house.registry, self.process), house.clock, max_model_tokens
        )
        self.links = WorkerConnectionPool(house.trust)
        self._conductors = ConductorPlacer(
            self.cluster,
            house.clock,
            house.trust,
            lambda address, trust: peers.SimChannel(address),  # type: ignore[arg-type, return-value]
        )
        placer = FallbackPlacer([self._conductors, RingPlacer(self.cluster)])
        self._guide = GenerationContext(placer, self.links, house.clock, JOURNEY)
        self.service = SimService(house.clock)
        self.http = HttpServer(self._answer, house.clock, LIMITS)
        house.network.serve(self.process, self.http._connection, self.address)
        self._started = self.process.spawn(self._start())

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await SimExchange(self)(scope, receive, send)

    async def _start(self) -> None:
        """It takes requests once it knows a worker, as its ``/ready`` says."""
        await self.cluster.refresh()
        while not any(self.cluster.ready(role) for role in WORKER_ROLES):
            await self._clock.sleep(0.1)
            await self.cluster.refresh()
        for work in (self.links.run(), self.cluster.run(), self._conductors.run()):
            self.process.spawn(work)
        await self._clock.sleep(0)

    @property
    def num_stray_lines(self) -> int:
        """Connections that nobody uses."""
        used = [link.alive for link in self.links._links.values()]
        used += [stream.alive for stream in self._conductors._streams.values()]
        return sum(each.kind == "line" for each in self.process.sockets) - sum(used)

    async def choice(self, answer: Answer) -> ChoiceStream:
        await asyncio.wait([self._started])
        ask, spec = answer.ask, answer.ask.spec
        chain = self.cluster.key_chain(spec.tenant_salt)
        keys = await compute_block_keys(chain, spec.token_ids)
        record = GenerationRecord(spec.request_id, self._clock.monotonic(), spec.num_prompt_tokens)
        journey = WatchedJourney(self._guide, spec, TENANT, "toy", chain, keys, record)
        journey.answer, answer.journey = answer, journey
        return ChoiceStream(
            0,
            journey,
            Letters(),
            [NEVER] if ask.has_stop_string else [],
            every_token=False,
            shows_stop=True,
        )


_end_line = FramedConnection._end


def _end_checked(self: FramedConnection, failure: BatonError) -> None:
    """As ``FramedConnection._end``. A line ends because a peer is gone, or says so; not because of
    what it carried."""
    is_nonsense = isinstance(failure, Invalid | Unauthorized)
    if is_nonsense or any(text in str(failure) for text in IMPOSSIBLE):
        PROCESS.get().loop.crash(failure)
    _end_line(self, failure)


@contextmanager
def wired() -> Iterator[None]:
    """While it lasts, what routers say over gRPC goes over the simulated network, and buffers are
    as small as messages."""
    with (
        patch("router.generation.grpc_worker_connection.open_channel", peers.open_channel),
        patch("router.generation.grpc_worker_connection._connected", peers.connected),
        patch("router.generation.grpc_worker_connection.run_worker_stream", peers.converse),
        patch("router.generation.conductor_placer.GrpcPlacementStream", peers.SimPlacementStream),
        patch.object(FramedConnection, "_end", _end_checked),
        patch("baton.rpc.framed.server.TICK_SECONDS", SERVER_TICK_SECONDS),
        patch("baton.rpc.frames.MAX_UNSENT_BYTES", MAX_UNSENT_BYTES),
    ):
        yield
