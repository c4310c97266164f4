"""Tests requests that a worker relays to its server's own API, over a server with vLLM's wire
forms."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from attached_worker.http_exchange import MAX_UNREAD_BYTES, RelayedExchange, ServerAddress
from attached_worker.program import check_role
from baton.core.server_api import (
    CHATS,
    COMPLETIONS,
    KNOWN_PATHS,
    ForwardedHead,
    ForwardRequest,
)
from baton.core.states import Role, WorkerState
from baton.core.task import Task
from baton.errors import Invalid, NotFound, Overloaded, Unavailable
from baton.rpc.channel import GrpcCalls, open_channel, translated_rpc_errors
from baton.rpc.server import build_server, listen
from baton.rpc.service import WORKER
from baton.rpc.v1 import worker_pb2 as pb
from baton.rpc.worker_client import ForwardClient
from baton.rpc.worker_service import add_worker_service
from baton.worker.context import WorkerConfig
from testkit.fakes.vllm_routes import CHAT_WORDS
from testkit.fakes.vllm_server import FakeVllm
from tests.unit.attached_worker.test_attached_worker import FACTS, attached, request

EMBEDDINGS = "/v1/embeddings"
STREAM = {"messages": [{"role": "user", "content": "a"}], "model": "m", "stream": True}


def fake_server(*paths: str) -> FakeVllm:
    fake = FakeVllm()
    fake.paths = paths or KNOWN_PATHS
    return fake


def forwarded(
    path: str = EMBEDDINGS, body: dict[str, Any] | None = None, num_tokens: int = 5
) -> ForwardRequest:
    data = json.dumps(body or {"model": "m", "input": "hello"}).encode()
    return ForwardRequest("r/1", path, "application/json", data, num_tokens)


async def answer(worker: Any, given: ForwardRequest) -> tuple[ForwardedHead, bytes]:
    head, *body = [part async for part in worker.forward(given)]
    assert isinstance(head, ForwardedHead)
    return head, b"".join(body)


async def test_the_answer_is_the_servers() -> None:
    fake = fake_server()
    async with attached(fake) as worker:
        head, body = await answer(worker, forwarded())
    assert (head.status, json.loads(body)["usage"]["prompt_tokens"]) == (200, 5)
    assert head.headers == {"content-type": "application/json", "content-length": str(len(body))}
    assert [each.path for each in fake.route_requests] == [EMBEDDINGS]


async def test_refusals_of_the_server_pass_with_their_body() -> None:
    fake = fake_server()
    async with attached(fake) as worker:
        fake.refusal = "no"
        head, body = await answer(worker, forwarded())
    assert (head.status, json.loads(body)) == (400, {"error": {"message": "no"}})


async def test_a_stream_comes_event_by_event() -> None:
    fake = fake_server()
    async with attached(fake) as worker:
        parts = worker.forward(forwarded(CHATS, STREAM))
        assert isinstance(await anext(parts), ForwardedHead)
        fake.step.clear()  # nothing more comes
        first = await anext(parts)
        fake.step.set()
        rest = b"".join([part async for part in parts])  # type: ignore[misc]
    assert isinstance(first, bytes)
    assert (first + rest).count(b"word") == CHAT_WORDS


@pytest.mark.parametrize("status", [500, 503])
async def test_failures_of_the_server_are_the_workers(status: int) -> None:
    fake = fake_server()
    fake.failure_status = status
    async with attached(fake) as worker:
        with pytest.raises(Unavailable, match=f"status {status}.*EngineDeadError"):
            await answer(worker, forwarded())
        assert worker.is_idle


@pytest.mark.parametrize(("ending", "problem"), [("error", "status 200.*died"), ("abort", "abort")])
async def test_a_stream_that_begins_with_a_failure_has_not_begun(ending: str, problem: str) -> None:
    fake = fake_server()
    fake.end_after, fake.ending = 0, ending
    async with attached(fake) as worker:
        with pytest.raises(Unavailable, match=problem):
            await anext(worker.forward(forwarded(CHATS, STREAM)))


async def test_an_answer_that_is_broken_off_is_a_failure_after_its_head() -> None:
    fake = fake_server()
    fake.end_after = 2
    async with attached(fake) as worker:
        for given in (forwarded(), forwarded(CHATS, STREAM)):
            parts = worker.forward(given)
            assert isinstance(await anext(parts), ForwardedHead)
            with pytest.raises(Unavailable, match="broke off its answer"):
                [part async for part in parts]


async def test_closing_cancels_at_the_server() -> None:
    fake = fake_server()
    fake.answers.clear()
    async with attached(fake) as worker:
        waiting = asyncio.ensure_future(answer(worker, forwarded(num_tokens=70)))
        while not fake.route_requests:
            await asyncio.sleep(0)
        assert (worker.load.waiting, worker.load.queued_tokens, worker.is_idle) == (1, 70, False)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        while not fake.num_cancelled:
            await asyncio.sleep(0)
        assert (worker.load.waiting, worker.load.running, worker.is_idle) == (0, 0, True)


async def test_a_drain_waits_for_forwarded_requests() -> None:
    fake = fake_server()
    fake.answers.clear()
    async with attached(fake) as worker:
        waiting = asyncio.ensure_future(answer(worker, forwarded()))
        while not fake.route_requests:
            await asyncio.sleep(0)
        worker.start_drain()
        worker._sweep()
        assert not worker.is_drained
        with pytest.raises(NotFound, match="does not serve /v1/embeddings now"):
            await answer(worker, forwarded())
        fake.answers.set()
        assert (await waiting)[0].status == 200
        assert worker.is_drained


async def test_a_frozen_server_gives_up_its_forwarded_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("attached_worker.worker.FORWARD_SECONDS", 0.0)
    fake = fake_server()
    async with attached(fake) as worker:
        fake.step.clear()
        with pytest.raises(Unavailable, match="is lost: it has computed nothing for"):
            await answer(worker, forwarded())
        fake.step.set()
        while worker.state is not WorkerState.READY:
            await asyncio.sleep(0.01)
        assert (await answer(worker, forwarded()))[0].status == 200


async def test_the_number_of_requests_is_bounded() -> None:
    fake = fake_server()
    fake.answers.clear()
    async with attached(fake) as worker:
        worker._config = WorkerConfig(max_jobs=1)
        waiting = asyncio.ensure_future(answer(worker, forwarded()))
        while not fake.route_requests:
            await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="already has 1 requests"):
            await answer(worker, forwarded())
        fake.answers.set()
        await waiting


@pytest.mark.parametrize("path", ["/sleep", "/v1/load_lora_adapter", EMBEDDINGS])
async def test_other_paths_of_the_server_can_not_be_reached(path: str) -> None:
    async with attached(fake_server(COMPLETIONS, CHATS)) as worker:
        with pytest.raises(NotFound, match="does not serve"):
            await answer(worker, forwarded(path))


@pytest.mark.parametrize(
    "paths",
    [("/pooling", EMBEDDINGS), (EMBEDDINGS,), ("/classify",), ("/v1/audio/transcriptions",)],
)
async def test_a_server_that_generates_nothing_can_be_attached(paths: tuple[str, ...]) -> None:
    fake = fake_server(*paths)
    async with attached(fake) as worker:
        stream = worker.open_stream()
        stream.submit(request(), Task.PREFILL_AND_DECODE, None)
        [refused] = await stream.next_outputs()
        assert "generates no tokens" in refused.error
    assert fake.requests == fake.route_requests == []


async def test_a_frozen_server_that_pools_is_noticed() -> None:
    fake = fake_server("/pooling")
    async with attached(fake) as worker:
        fake.step.clear()
        while worker.state is WorkerState.READY:
            await asyncio.sleep(0.01)
        fake.step.set()
        while worker.state is not WorkerState.READY:
            await asyncio.sleep(0.01)


async def test_a_server_that_does_not_list_its_routes_is_asked_for_tokens() -> None:
    async with attached(fake_server(COMPLETIONS)) as worker:
        assert worker._facts.paths == (COMPLETIONS,)


async def test_a_server_that_pools_is_no_prefill_server() -> None:
    facts = replace(FACTS, paths=("/pooling",))
    with pytest.raises(Invalid, match="a decode worker's server must generate tokens"):
        check_role(facts, Role.DECODE)
    check_role(facts, Role.MIXED)


@asynccontextmanager
async def flooding(size: int) -> AsyncIterator[tuple[ServerAddress, list[int]]]:
    """Run a server whose answer has ``size`` bytes, and count those that it could send."""
    sent = [0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n".encode())
        while sent[0] < size:
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent[0] += 1 << 16
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield ServerAddress("127.0.0.1", server.sockets[0].getsockname()[1]), sent


async def test_a_server_waits_for_a_slow_reader() -> None:
    size = 64 << 20
    async with flooding(size) as (address, sent):
        exchange = RelayedExchange(address, address.encode("POST", "/", b""))
        await exchange.start()
        before = -1
        while sent[0] > before:  # until the server is stuck
            before = sent[0]
            for _ in range(1000):
                await asyncio.sleep(0)
        assert len(exchange._unread) < 2 * MAX_UNREAD_BYTES
        assert sent[0] < size
        assert sum([len(data) async for data in exchange.body()]) == size


async def test_it_works_over_grpc() -> None:
    """Bodies of any size pass, errors keep their kind, and a client that leaves cancels."""
    fake = fake_server()
    async with attached(fake) as worker:
        server = build_server("secret")
        add_worker_service(server, worker, worker)
        address = f"127.0.0.1:{await listen(server, '127.0.0.1', 0, 'secret')}"
        client = ForwardClient("secret")
        try:
            body = {"model": "m", "input": "a" * (6 << 20)}
            async with aclosing(client.forward(address, forwarded(body=body))) as parts:
                head, *rest = [part async for part in parts]
            assert isinstance(head, ForwardedHead)
            assert json.loads(b"".join(rest))["usage"]["prompt_tokens"] == 6 << 20  # type: ignore[arg-type]
            with pytest.raises(NotFound, match="does not serve /sleep"):
                await anext(client.forward(address, forwarded("/sleep")))
            fake.answers.clear()
            waiting = asyncio.ensure_future(anext(client.forward(address, forwarded())))
            while len(fake.route_requests) < 2:
                await asyncio.sleep(0.001)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            while not fake.num_cancelled:
                await asyncio.sleep(0.001)
        finally:
            await client.close()
            await server.stop(None)


async def test_a_request_without_a_head_is_refused() -> None:
    async with attached(fake_server()) as worker:
        server = build_server()
        add_worker_service(server, worker, worker)
        port = await listen(server, "127.0.0.1", 0)
        async with open_channel(f"127.0.0.1:{port}") as channel:
            call = GrpcCalls(channel, WORKER).open_stream("Forward")
            with pytest.raises(Invalid, match="must be its `head`"), translated_rpc_errors():
                await call.write(pb.ForwardRequest(body=b"a"))
                await call.read()
        await server.stop(None)
