"""Tests how many functions a token and a request pass through in a router, with the connections
that production uses: framed ones to a worker and a conductor, and HTTP from a client.

A function counts if it is on the call stack when the bytes are written; functions that have already
returned do not count. ``docs/router.md`` has the same lists."""

import asyncio
import sys
import traceback
from asyncio import selector_events
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from baton.clock import SystemClock
from baton.core.credentials import ClusterCredentials
from baton.core.ids import Incarnation, TokenId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.member import Member
from baton.core.placement import Placement, PlacementQuery
from baton.core.request import FinishReason, RequestOutput, RequestSpec
from baton.core.states import Role, WorkerState
from baton.rpc.conductor_service import framed_conductor_services
from baton.rpc.framed.server import FramedServer
from baton.text.tokenizer import Tokenizer
from router.generation.conductor_placer import ConductorPlacer
from router.generation.generation_context import GenerationContext
from router.generation.placement import FallbackPlacer
from router.generation.ring_placer import RingPlacer
from router.serving.choice_stream import ChoiceStream
from router.serving.delivery import InlineStreamWriter
from tests.router_harness import CHAT, RouterHarness, chat, events, write_tokenizer
from tests.unit.router.http.test_router_connections import FakeCore, framed_worker, open_connections

ROOT = Path(__file__).parents[4]
PRODUCTION = tuple(f"{ROOT / room}/" for room in ("baton", "router"))
TEXT = b"Hey!"

MAX_TOKEN_HOPS, MAX_REQUEST_HOPS = 6, 19

TOKEN_PATH = [
    "baton/rpc/framed/connection.py FramedConnection.data_received",
    "router/generation/worker_connection.py FramedWorkerConnection._receive",
    "router/generation/worker_connection.py FramedWorkerConnection.deliver",
    "router/generation/attempt.py Attempt.receive",
    "router/serving/delivery.py InlineStreamWriter.write_output",
    "router/http/body_senders.py UvicornBodyWriter.write",
]

HANDLER_PATH = [
    "router/http/frontend.py HttpFrontend.__call__",
    "router/http/frontend.py HttpFrontend._answer",
    "router/serving/request_handler.py RequestHandler.__call__",
    "router/serving/request_handler.py RequestHandler._serve",
    "router/http/response_writer.py cancel_on_disconnect",
    "router/serving/generate.py generate",
    "router/serving/delivery.py AnswerDelivery.stream",
    "router/serving/choices.py run_choices",
    "router/serving/choices.py _run_choice",
    "router/serving/choice_stream.py ChoiceStream.run",
    "router/generation/generation.py Generation.outputs",
]

PLACE = "baton/rpc/framed/calls.py CallClient.call"

PLACEMENT_PATH = [
    *HANDLER_PATH,
    "router/generation/generation.py Generation._place",
    "router/generation/placement_search.py PlacementSearch.find",
    "router/generation/placement_search.py PlacementSearch._query",
    "router/generation/placement.py FallbackPlacer.place",
    "router/generation/conductor_placer.py ConductorPlacer.place",
    "baton/rpc/conductor_client.py request_placement",
    PLACE,
    "baton/rpc/frames.py FrameProtocol.send",
]

SUBMIT = "router/generation/attempt.py Attempt.submit"

SUBMISSION_PATH = [
    *HANDLER_PATH,
    SUBMIT,
    "router/generation/worker_connection.py FramedWorkerConnection.submit",
    "router/generation/worker_connection.py FramedWorkerConnection.send",
    "baton/rpc/framed/connection.py FramedConnection.send_message",
    "baton/rpc/frames.py FrameProtocol.send",
]


def production_stack() -> list[str]:
    """Return the functions of production code on the call stack, the outermost first."""
    # Not walk_stack(None), which skips a number of frames that differs between versions of Python.
    codes = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe())]
    return [
        f"{Path(code.co_filename).relative_to(ROOT)} {code.co_qualname}"
        for code in reversed(codes)
        if code.co_filename.startswith(PRODUCTION)
    ]


class Recorded:
    """Records the call stack of each write to a socket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes: list[tuple[bytes, list[str]]] = []
        transport: Any = selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
        write = transport.write

        def record_write(self_: Any, data: bytes) -> None:
            self.writes.append((bytes(data), production_stack()))
            write(self_, data)

        monkeypatch.setattr(transport, "write", record_write)

    def clear(self) -> None:
        self.writes.clear()

    def writers_of(self, content: bytes) -> list[str]:
        """Return the call stack of the write that contains ``content``; there must be exactly
        one."""
        [path] = [path for data, path in self.writes if content in data]
        return path


class OneWorkerConductor:
    """A conductor's core that places all requests on one worker."""

    def __init__(self, worker: WorkerRef) -> None:
        self._worker = worker

    def place(self, query: PlacementQuery) -> Placement:
        return Placement(None, self._worker, "the only worker")


@asynccontextmanager
async def conductor(worker: WorkerRef) -> AsyncIterator[Member]:
    core, trust = OneWorkerConductor(worker), ClusterCredentials(None)
    server = FramedServer(trust, framed_conductor_services(core))  # type: ignore[arg-type]
    framed_address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    try:
        yield Member(
            WorkerId("c"),
            Role.CONDUCTOR,
            "c:1",
            Incarnation(1),
            WorkerState.READY,
            framed_address=framed_address,
        )
    finally:
        await server.close()


@asynccontextmanager
async def framed_router(tokenizer: Tokenizer) -> AsyncIterator[tuple[FakeCore, httpx.AsyncClient]]:
    """Run a router with one worker and one conductor, both with framed connections."""
    router, clock = RouterHarness(tokenizer, "", automatic=False), SystemClock()
    async with (
        framed_worker() as (core, ref, _),
        conductor(ref) as member,
        open_connections() as connections,
    ):
        router.members.list.append(member)
        conductors = ConductorPlacer(router.service.cluster, clock, None)
        placer = FallbackPlacer([conductors, RingPlacer(router.model.workers)])
        router.model.generation_context = GenerationContext(placer, connections, clock)
        async with await router.client() as client:
            yield core, client
        conductors.close()


def answer_tokens(spec: RequestSpec, text: bytes) -> Iterator[RequestOutput]:
    for index, byte in enumerate(text):
        is_last = index + 1 == len(text)
        yield RequestOutput(
            spec.request_id,
            spec.epoch,
            index,
            (TokenId(byte),),
            finish_reason=FinishReason.LENGTH if is_last else None,
        )


async def until_written(recorded: Recorded, content: bytes) -> None:
    async with asyncio.timeout(20):
        while not any(content in data for data, _ in recorded.writes):
            await asyncio.sleep(0)


async def stream_answers(
    core: FakeCore, client: httpx.AsyncClient, recorded: Recorded, count: int = 1
) -> list[httpx.Response]:
    """Stream ``count`` answers at the same time. Each answer's next token is generated only after
    its previous token has been written to the client."""
    recorded.clear()
    core.submitted.clear()
    asked = [
        asyncio.create_task(client.post(CHAT, json=chat(stream=True, max_tokens=len(TEXT))))
        for _ in range(count)
    ]
    await core.wait(lambda: len(core.submitted) == count)
    answers = [answer_tokens(spec, TEXT) for spec, _, _ in core.submitted]
    for number, outputs in enumerate(zip(*answers, strict=True)):
        put_all(core, outputs)
        if number + 1 < len(TEXT):
            await until_written(recorded, b'"content":"%c"' % TEXT[number])
            await until_idle()
    return [await each for each in asked]


def put_all(core: FakeCore, outputs: Iterable[RequestOutput]) -> None:
    """Send the outputs of a step in one message."""
    for output in outputs:
        core.streams[0].put(output)


async def until_idle() -> None:
    """Let all tasks that a token has woken run until they wait again."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


async def test_paths_of_a_token_and_of_a_request(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(monkeypatch)
    async with framed_router(tokenizer) as (core, client):
        await stream_answers(core, client, recorded)  # it opens the connections
        [response] = await stream_answers(core, client, recorded)
    assert text_of(events(response)[:-1]) == "Hey!"
    assert [path for _, path in recorded.writes if PLACE in path] == [PLACEMENT_PATH]
    assert [path for _, path in recorded.writes if SUBMIT in path] == [SUBMISSION_PATH]
    for token in TEXT[1:-1]:  # the first and the last one take the general path
        assert recorded.writers_of(b'"content":"%c"' % token) == TOKEN_PATH
    assert len(TOKEN_PATH) <= MAX_TOKEN_HOPS
    assert max(len(PLACEMENT_PATH), len(SUBMISSION_PATH)) <= MAX_REQUEST_HOPS


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


async def test_bug_on_the_fast_path_ends_only_its_request(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers are streamed, with their outputs in the same messages. Writing one of them raises
    an error; the other one is completed."""
    recorded, write_output = Recorded(monkeypatch), InlineStreamWriter.write_output

    def crash(self: InlineStreamWriter, choice: ChoiceStream, output: RequestOutput) -> bool:
        if output.request_id == "chatcmpl-1" and output.first_index == 2:
            raise ZeroDivisionError
        return write_output(self, choice, output)

    monkeypatch.setattr(InlineStreamWriter, "write_output", crash)
    async with framed_router(tokenizer) as (core, client):
        await stream_answers(core, client, recorded)
        with capture_logs() as logs:
            responses = await stream_answers(core, client, recorded, count=2)
    crashes = [each["request_id"] for each in logs if each["event"] == "delivery_crashed"]
    assert crashes == ["chatcmpl-1"]
    failed, complete = sorted(map(events, responses), key=len)
    assert text_of(complete[:-1]) == "Hey!"
    assert text_of(failed[:-1]) == "He"
    assert failed[-1]["error"]["message"] == "internal error"
