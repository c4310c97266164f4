"""A simulated router. It runs the production code of HTTP connections, responses, generations,
worker connections, placers and the view of the cluster. It does not run the code that precedes a
generation: the parsing of bodies, tokenization and tenants."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from starlette.types import Receive, Scope, Send

from baton.core.ids import TenantId
from baton.core.request import RequestOutput
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import BatonError, Invalid, Unauthorized
from baton.rpc.framed.connection import FramedConnection
from router.generation.attempt import InlineConsumer, TokenTimeouts
from router.generation.block_key_hasher import compute_block_keys
from router.generation.cluster import Cluster
from router.generation.conductor_placer import ConductorPlacer
from router.generation.generation import Generation
from router.generation.generation_context import FailoverConfig, GenerationContext
from router.generation.placement import FallbackPlacer
from router.generation.record import GenerationHistory, GenerationRecord
from router.generation.ring_placer import RingPlacer
from router.generation.worker_connection_pool import WorkerConnectionPool
from router.http.connection_limits import ConnectionLimits
from router.http.raw_body import BodyBudget
from router.http.response_writer import (
    INLINE_WRITER_KEY,
    JSON_HEADERS,
    ResponseWriter,
    cancel_on_disconnect,
    read_body,
)
from router.http.server import HttpServer
from router.openai.encoders.completion import CompletionEncoder
from router.openai.encoders.encoder import ResponseMetadata
from router.openai.endpoints import COMPLETIONS
from router.serving.choice_result import ChoiceResult as Worded
from router.serving.choice_stream import ChoiceStream
from router.serving.context import RequestResources
from router.serving.delivery import AnswerDelivery
from router.serving.generate import COMMENT_PING
from router.serving.request import GenerationRequest, Texts
from router.serving.request_handler import RequestHandler
from router.serving.schema.sampling_fields import SamplingFields
from tests.sim.whole.clients import FIRST_CHARACTER, ClientResponse, GuaranteeViolation
from tests.sim.whole.process import PROCESS, Process
from tests.sim.whole.registry import SimRegistryClient

if TYPE_CHECKING:
    from tests.sim.whole.worker import SimEnvironment

TENANT = TenantId("tenant")
FAILOVER_CONFIG = FailoverConfig(
    timeouts=TokenTimeouts(
        first_token_timeout_seconds=5.0,
        kv_transfer_timeout_seconds=5.0,
        next_token_timeout_seconds=1.5,
    )
)
WRITE_SECONDS = 3.0
LIMITS = ConnectionLimits(write_timeout_seconds=WRITE_SECONDS)
MAX_UNSENT_BYTES = 16 * 1024
"""Replaces a limit of 32 MiB, because messages in the simulation are much smaller, too."""

SERVER_TICK_SECONDS = 1.0
"""Replaces a tick of 2 s, because a router in the simulation is frozen for at most 4 s."""

ENVELOPE = ResponseMetadata("cmpl-1", 1, "toy", return_token_ids=False, has_usage_chunk=False)
NEVER = "\x00"
"""A stop string that never occurs. It prevents inline delivery, which is not possible for text that
must be searched for stop strings."""

IMPOSSIBLE = (" are missing", "malformed", "do not match the requests")
"""Texts that no error may contain: connections neither lose nor change data, so no process may
detect a gap or a malformed message."""


class LetterDetokenizer:
    """Implements :class:`baton.text.detokenizer.IncrementalDetokenizer` with one character per
    token."""

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(chr(FIRST_CHARACTER + token_id) for token_id in token_ids)

    def flush(self) -> str:
        return ""


class CheckedGeneration(Generation):
    """A generation that lets ``answer`` check every accepted output, whether the output is
    delivered inline or queued."""

    answer: ClientResponse
    _is_over = False

    async def outputs(
        self, inline_consumer: InlineConsumer | None = None
    ) -> AsyncGenerator[RequestOutput]:
        def consume(output: RequestOutput) -> bool:
            assert inline_consumer is not None
            if self._is_over:
                raise GuaranteeViolation(
                    f"{output.request_id}: a token was delivered after the generation had ended"
                )
            return inline_consumer(output)

        checked = consume if inline_consumer is not None else None
        try:
            async with aclosing(super().outputs(checked)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._is_over = True

    def _record_output(self, output: RequestOutput) -> None:
        self.answer.check_output(output)
        super()._record_output(output)


class NoMetrics:
    """Metrics that record nothing."""

    def __getattr__(self, name: str) -> "NoMetrics":
        return self

    def __call__(self, *arguments: Any) -> "NoMetrics":
        return self


class SimRouterContext:
    """The part of :class:`router.serving.context.RouterContext` that a request handler needs."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.telemetry = SimpleNamespace(
            tracer=None, metrics=NoMetrics(), history=GenerationHistory()
        )
        self.resources = RequestResources(BodyBudget(LIMITS.max_body_bytes))


class SimRequestHandler(RequestHandler):
    """Handles one HTTP request, whose path names one of the run's client requests."""

    def __init__(self, router: "SimRouter") -> None:
        super().__init__(router.service, COMPLETIONS)  # type: ignore[arg-type]
        self._router = router
        self._path = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._path = scope["path"]
        await super().__call__(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, response: ResponseWriter) -> None:
        with self._router.service.resources.body_budget.new_body(TENANT, 1.0, shared=False) as raw:
            await read_body(
                scope, receive, raw, LIMITS.max_body_bytes, LIMITS.header_timeout_seconds
            )
            await cancel_on_disconnect(scope[INLINE_WRITER_KEY], self.answer(response))

    async def answer(self, response: ResponseWriter) -> None:
        answer = self._router.environment.answers[self._path.removeprefix("/")]
        choice = await self._router.choice(answer)
        worded = [Worded(0, answer.request.spec.token_ids)]
        encoder = CompletionEncoder(ENVELOPE, None, with_logprobs=False)  # type: ignore[arg-type]
        request = GenerationRequest(Texts(["a"]), SamplingFields(), stream=answer.request.streams)
        if request.stream:
            response.start_pings({}, COMMENT_PING)
        budget = self._router.service.resources.logprobs_budget
        kept_logprobs = budget.new_request(TENANT, 1.0, "logprobs", shared=False)
        delivery = AnswerDelivery(
            self._context, TENANT, request, [choice], worded, encoder, kept_logprobs, {}
        )
        if request.stream:
            await response.end(await delivery.stream(response))
        else:
            data = await delivery.generate()
            await response.respond(200, JSON_HEADERS | delivery.debug_headers(choice), data)


class SimRouter:
    """A router that listens for clients at ``address``. Its framed connections are production
    code."""

    def __init__(
        self,
        environment: "SimEnvironment",
        name: str,
        max_model_tokens: int,
        failover: FailoverConfig | None = None,
    ) -> None:
        self.environment = environment
        self.process = Process(name, environment.network)
        self.address = f"{name}:80"
        self._clock = environment.clock
        self.cluster = Cluster(
            SimRegistryClient(environment.registry, self.process),
            environment.clock,
        )
        self._workers = self.cluster.workers_of("toy", max_model_tokens)
        self.worker_connections = WorkerConnectionPool(environment.credentials)
        self._conductors = ConductorPlacer(self.cluster, environment.clock, environment.credentials)
        ring = RingPlacer(self._workers, self.worker_connections.num_requests)
        placer = FallbackPlacer([self._conductors, ring])
        self._generation_context = GenerationContext(
            placer,
            self.worker_connections,
            environment.clock,
            failover or FAILOVER_CONFIG,
            rank_variants=self._workers.rank_variants,
            expects_workers=self._workers.expects_workers,
        )
        self.service = SimRouterContext(environment.clock)
        self.http = HttpServer(self._answer, environment.clock, LIMITS)
        environment.network.serve(self.process, self.http._connection, self.address)
        self._started = self.process.start_task(self._start())

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await SimRequestHandler(self)(scope, receive, send)

    async def _start(self) -> None:
        """Wait until a worker is ready, then start the background tasks. Requests wait until this
        has finished."""
        await self.cluster.refresh()
        while not any(self.cluster.ready_members(role) for role in WORKER_KINDS):
            await self._clock.sleep(0.1)
            await self.cluster.refresh()
        for coroutine in (self.worker_connections.run(), self.cluster.run()):
            self.process.start_task(coroutine)
        await self._clock.sleep(0)

    @property
    def num_unused_connections(self) -> int:
        """The number of framed connections that are open but not used."""
        used = [link.is_alive for link in self.worker_connections._connections.values()]
        for client in self._conductors._conductors.values():
            opening, connection = client._opening, client._connection
            used.append(opening is not None)
            used.append(connection is not None and not connection.has_ended)
        return sum(each.kind == "line" for each in self.process.sockets) - sum(used)

    async def choice(self, answer: ClientResponse) -> ChoiceStream:
        await asyncio.wait([self._started])
        ask, spec = answer.request, answer.request.spec
        variant = next(iter(self._workers.rank_variants(spec.request_id)), None)
        keys = () if variant is None else await compute_block_keys(spec, variant)
        record = GenerationRecord(spec.request_id, self._clock.monotonic(), spec.num_prompt_tokens)
        generation = CheckedGeneration(
            self._generation_context, spec, TENANT, "toy", variant, keys, record
        )
        generation.answer, answer.generation = answer, generation
        return ChoiceStream(
            0,
            generation,
            LetterDetokenizer(),
            [NEVER] if ask.has_stop_string else [],
            emit_every_step=False,
            include_stop=True,
        )


_end_line = FramedConnection._end


def _end_checked(self: FramedConnection, failure: BatonError) -> None:
    """Call ``FramedConnection._end``. Fail the run if the connection ends because of the data that
    it carried: it may end only because its peer is gone or has closed it."""
    is_nonsense = isinstance(failure, Invalid | Unauthorized)
    if is_nonsense or any(text in str(failure) for text in IMPOSSIBLE):
        PROCESS.get().loop.crash(failure)
    _end_line(self, failure)


@contextmanager
def simulated_limits() -> Iterator[None]:
    """Replace some limits of framed connections by values that fit the simulation, and check how
    they end."""
    with (
        patch.object(FramedConnection, "_end", _end_checked),
        patch("baton.rpc.framed.server.TICK_SECONDS", SERVER_TICK_SECONDS),
        patch("baton.rpc.frames.MAX_UNSENT_BYTES", MAX_UNSENT_BYTES),
    ):
        yield
