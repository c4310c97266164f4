"""Tests the HTTP API over in-memory workers: authentication, limits, failures, the endpoints for
operations, and clients that disconnect."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from baton.core.ids import WorkerId
from baton.core.placement import Placement, PlacementQuery, ScoredWorker
from baton.core.states import Role
from baton.errors import Overloaded
from baton.placement.refusal import PlacementRefused
from baton.text.tokenizer import Tokenizer
from router.app import build_app
from testkit.fakes.workers import FakeWorker
from tests import router_harness
from tests.http_transport import HttpServerTransport
from tests.router_harness import (
    CHAT,
    COMPLETE,
    CONTEXT,
    EOS,
    RouterHarness,
    chat,
    events,
    eventually,
    member,
    model_saying,
    open_harness,
    post_raw,
    serve_over_tcp,
    step_until_done,
    wrong_error,
)

tokenizer = router_harness.tokenizer


# -- authentication and limits --------------------------------------------------------------


async def test_api_keys_and_tenants(tokenizer: Tokenizer) -> None:
    keys = {"sk-a": "alice", "sk-b": "bob"}
    async with open_harness(tokenizer, api_keys=keys, tenant_secret="s") as (router, client):
        for header in (None, "Bearer sk-x", "Basic sk-a", "Bearer", "sk-a"):
            headers = {"authorization": header} if header else {}
            response = await client.post(CHAT, json=chat(), headers=headers)
            assert wrong_error(response, 401)["code"] == "invalid_api_key"
            wrong_error(await client.get("/v1/models", headers=headers), 401)
        for key in keys:
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.post(CHAT, json=chat(), headers=headers)).status_code == 200
    tenants = [query.tenant for query in router.placer.queries]
    assert tenants == ["alice", "bob"]
    one, other = (job.spec.tenant_salt for job in router.prefill.submitted)
    assert len(one) == len(other) == 16 and one != other
    assert router.placer.queries[0].block_keys[0] != router.placer.queries[1].block_keys[0]


async def test_concurrent_requests_are_limited(tokenizer: Tokenizer) -> None:
    limits = {"automatic": False, "max_concurrent_requests": 2}
    async with open_harness(tokenizer, **limits) as (router, client):  # type: ignore[arg-type]
        one = asyncio.create_task(client.post(CHAT, json=chat()))
        two = asyncio.create_task(client.post(CHAT, json=chat()))
        await eventually(lambda: len(router.decode.jobs) == 2)
        response = await client.post(CHAT, json=chat())
        assert wrong_error(response, 429)["type"] == "rate_limit_error"
        assert int(response.headers["retry-after"]) >= 1
        await step_until_done(router, one, two)
        three = await client.post(CHAT, json=chat(n=3))
        wrong_error(three, 429)


@pytest.mark.parametrize(
    ("seconds", "request_id", "milliseconds"),
    [
        ("0.2", "a", 1_910),
        ("7", "a", 13_364),
        ("7", "b", 10_111),
        ("7", "c", 7_184),
        ("60", "a", 69_091),
    ],
)
async def test_overloaded_workers_retry_after_is_spread_by_request_id(
    tokenizer: Tokenizer, seconds: str, request_id: str, milliseconds: int
) -> None:
    headers = {"x-request-id": request_id}
    async with open_harness(tokenizer, automatic=False) as (router, client):
        task = asyncio.create_task(client.post(CHAT, json=chat(stream=True), headers=headers))
        await eventually(lambda: bool(router.prefill.jobs))
        router.prefill.fail_jobs("RESOURCE_EXHAUSTED", "full", retry_after_seconds=seconds)
        response = await task
    wrong_error(response, 429)
    assert response.headers["retry-after-ms"] == str(milliseconds)
    assert response.headers["retry-after"] == str(-(-milliseconds // 1_000))


async def test_failure_before_the_first_token_sets_the_http_status(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        router.placer.decode = []
        assert wrong_error(await client.post(CHAT, json=chat(stream=True)), 503)


async def test_failure_in_the_middle_of_a_stream_is_its_last_event(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, automatic=False) as (router, client):
        task = asyncio.create_task(client.post(COMPLETE, json={"prompt": "x", "stream": True}))
        await eventually(lambda: bool(router.decode.jobs))
        router.prefill.step()
        router.decode.step()
        await eventually(
            lambda: router.service.telemetry.history.explain("cmpl-0")["completion_tokens"] == 2
        )
        router.decode.fail_jobs("INVALID_ARGUMENT", "went wrong")
        *chunks, last = events(await task)
        explained = (await client.get("/admin/requests/cmpl-0")).json()
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "He"
    assert last["error"]["message"] == "went wrong"
    assert explained["finish_reason"] == "error" and explained["error"] == "went wrong"


@pytest.mark.parametrize("continuation", ["exact", "numeric"])
@pytest.mark.parametrize("stream", [False, True])
async def test_failover_is_invisible_to_the_client(
    tokenizer: Tokenizer, stream: bool, continuation: str
) -> None:
    async with open_harness(tokenizer, automatic=False) as (router, client):
        spare = FakeWorker("d1", model_saying("Hello, wörld!"), eos=EOS, automatic=False)
        if continuation == "numeric":
            spare.details = {"continuation": "numeric"}
        router.placer.decode.append(spare)
        router.model.generation_context.connections.workers[spare.ref.id] = spare  # type: ignore[attr-defined]
        task = asyncio.create_task(client.post(COMPLETE, json={"prompt": "x", "stream": stream}))
        await eventually(lambda: bool(router.decode.jobs))
        router.prefill.step()
        for _ in range(8):
            router.decode.step()
        await eventually(
            lambda: router.service.telemetry.history.explain("cmpl-0")["completion_tokens"] == 9
        )
        router.decode.kill()
        while not task.done():
            router.prefill.step()
            spare.step()
            await asyncio.sleep(0)
        response = await task
        explained = (await client.get("/admin/requests/cmpl-0")).json()
    parts = (
        [e["choices"][0] for e in events(response)[:-1]] if stream else response.json()["choices"]
    )
    assert "".join(part["text"] for part in parts) == "Hello, wörld!"
    assert explained["continuation"] == continuation
    if stream:
        assert f": x-baton-continuation: {continuation}\n\ndata: [DONE]" in response.text
    else:
        assert response.headers["x-baton-continuation"] == continuation
    assert explained["decode"]["id"] == "d1"
    assert [p["decode"]["id"] for p in explained["placements"]] == ["d0", "d1"]
    assert spare.submitted[0].spec.num_prompt_tokens == 1
    assert bytes(spare.submitted[0].spec.token_ids) == "xHello, wö".encode()[:10]


# -- operations -----------------------------------------------------------------------------


async def test_models_health_ready_and_metrics_endpoints(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        models = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/demo")).json()
        page = {"has_more": False, "first_id": "demo", "last_id": "demo"}
        assert models == {"object": "list", "data": [one], **page}
        assert one["id"] == "demo" and one["max_model_len"] == CONTEXT
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        await client.post(CHAT, json=chat())
        text = (await client.get("/metrics")).text
        assert 'baton_requests_total{endpoint="chat",model="demo",status="200"} 1.0' in text
        assert 'baton_completion_tokens_total{model="demo"} 15.0' in text
        assert 'baton_kv_transfer_bytes_total{model="demo",transport="shm"} 140.0' in text
        router.members.list = [member("p0", Role.PREFILL)]
        await router.service.cluster.refresh()
        assert (await client.get("/ready")).status_code == 503
        router.service.draining = True
        wrong_error(await client.post(CHAT, json=chat()), 503)


async def test_explain_describes_a_request(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        ask = router.placer.place

        async def tell(query: PlacementQuery) -> Placement:
            others = (ScoredWorker(WorkerId("p0"), 1.5, 0.5, 0.25, 3),)
            placement = await ask(query)
            return replace(
                placement, policy="scripted", ttft_seconds=0.25, prefill_alternatives=others
            )

        router.placer.place = tell  # type: ignore[method-assign]
        await client.post(CHAT, json=chat(n=2))
        explained = (await client.get("/admin/requests/chatcmpl-0")).json()
        wrong_error(await client.get("/admin/requests/other"), 404)
    assert explained["prefill"] == {"id": "p0", "address": "p0:1", "generation": 1}
    assert explained["transport"] == "shm" and explained["kv_transfer_bytes"] == 140
    assert explained["finish_reason"] == "stop"
    assert 0 <= explained["queue_seconds"] <= explained["ttft_seconds"]
    assert explained["ttft_seconds"] <= explained["total_seconds"]
    assert (explained["policy"], explained["reason"]) == ("scripted", "memory")
    predicted = {"ttft_seconds": 0.25, "itl_seconds": None}
    assert explained["predicted"] == predicted
    assert explained["actual"]["ttft_seconds"] == explained["ttft_seconds"]
    assert 0 <= explained["actual"]["itl_seconds"] <= explained["total_seconds"]
    expected = {
        "worker": "p0", "score": 1.5, "queue_seconds": 0.5, "service_seconds": 0.25,
        "local_blocks": 3, "fetched_blocks": 0, "late_seconds": 0.0,
    }  # fmt: skip
    assert explained["alternatives"] == {"prefill": [expected], "decode": [], "mixed": []}
    assert [choice["request_id"] for choice in explained["choices"]] == [
        "chatcmpl-0-0", "chatcmpl-0-1",
    ]  # fmt: skip


async def test_admin_api_needs_the_admin_key_or_a_local_client(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, admin_key="root") as (_, client):
        await client.post(CHAT, json=chat())
        path = "/admin/requests/chatcmpl-0"
        wrong_error(await client.get(path), 401)
        wrong_error(await client.get(path, headers={"authorization": "Bearer x"}), 401)
        answer = await client.get(path, headers={"authorization": "Bearer root"})
        assert answer.status_code == 200
    async with open_harness(tokenizer) as (router, _):
        far = HttpServerTransport(build_app(router.service), client=("10.0.0.1", 5))
        async with httpx.AsyncClient(transport=far, base_url="http://test") as client:
            wrong_error(await client.get(path), 403)


# -- over a real socket ---------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 4])
async def test_disconnected_client_frees_both_workers(
    tokenizer: Tokenizer, stream: bool, steps: int
) -> None:
    router = RouterHarness(tokenizer, "Hello, wörld!", automatic=False)
    async with serve_over_tcp(router) as url, httpx.AsyncClient() as client:
        task = asyncio.create_task(client.post(url + CHAT, json=chat(stream=stream)))
        await eventually(lambda: bool(router.decode.jobs))
        if steps:
            router.prefill.step()
        for _ in range(steps - 1):
            router.decode.step()
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        await eventually(lambda: router.service.tenants.request_limiter.num_in_use == 0)
        assert router.prefill.cancelled == router.decode.cancelled == [("chatcmpl-0", 1)]
        assert (
            router.service.telemetry.history.explain("chatcmpl-0")["finish_reason"] == "cancelled"
        )  # type: ignore[index]
        text = router.service.telemetry.metrics.render().decode()
        assert 'baton_answers_total{model="demo",reason="cancelled"} 1.0' in text
        assert 'baton_requests_total{endpoint="chat",model="demo",status="499"} 1.0' in text


async def test_too_large_bodies_are_rejected(tokenizer: Tokenizer) -> None:
    router = RouterHarness(tokenizer, "x", automatic=True, max_body_bytes=100_000)
    piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    async with serve_over_tcp(router) as url:
        declared = await post_raw(url, "content-length: 100001", [])
        assert declared.startswith(b"HTTP/1.1 413")
        undeclared = await post_raw(url, "transfer-encoding: chunked", [piece] * 4)
        assert undeclared.startswith(b"HTTP/1.1 413")
        lying = await post_raw(url, "content-length: 2", [b"{}" + b"x" * 1000], end=b"")
        assert lying.startswith(b"HTTP/1.1 400")
    assert router.service.tenants.request_limiter.num_in_use == 0


async def test_body_that_never_arrives_times_out(tokenizer: Tokenizer) -> None:
    router = RouterHarness(tokenizer, "x", automatic=True, body_timeout_seconds=0.05)
    async with serve_over_tcp(router) as url:
        response = await post_raw(url, "content-length: 10", [b"{"])
        assert response.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/v1/audio/speech", "this server only generates text"),
        ("/v1/images/generations", "this server only generates text"),
        ("/v1/threads/thread_1/runs", "deprecated by OpenAI; use /v1/responses"),
    ],
)
async def test_an_api_that_is_not_supported_is_refused_by_name(
    tokenizer: Tokenizer, path: str, reason: str
) -> None:
    async with open_harness(tokenizer) as (_, client):
        answer = await client.post(path, json={"model": "demo", "input": "x"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_endpoint")
        assert error["message"] == f"{path} is not supported: {reason}"
        unknown = await client.post("/v1/embeddingsx", json={})
        assert unknown.json()["error"]["message"].startswith("Unknown route: POST /v1/embeddingsx")


async def test_a_key_may_come_in_anthropics_header(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, api_keys={"key-a": "tenant-a"}) as (_, client):
        for path in (CHAT, "/v1/models"):
            method = "POST" if path == CHAT else "GET"
            body = chat() if path == CHAT else None
            accepted = await client.request(method, path, json=body, headers={"x-api-key": "key-a"})
            assert accepted.status_code == 200
            refused = await client.request(method, path, json=body, headers={"x-api-key": "key-b"})
            assert refused.status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer key-a", "x-api-key": "key-a"}, 200),
        ({"authorization": "Bearer key-a", "x-api-key": "key-b"}, 400),
        ({"authorization": "Bearer key-b", "x-api-key": "key-a"}, 400),
        ({"authorization": "Basic key-a", "x-api-key": "key-a"}, 401),
    ],
)
async def test_two_keys_must_be_equal(
    tokenizer: Tokenizer, headers: dict[str, str], status: int
) -> None:
    async with open_harness(tokenizer, api_keys={"key-a": "a", "key-b": "b"}) as (_, client):
        for answer in (
            await client.post(CHAT, json=chat(), headers=headers),
            await client.get("/v1/models", headers=headers),
        ):
            assert answer.status_code == status
            assert (status == 400) == ("have different keys; send only one" in answer.text)


async def test_explanation_of_a_refused_request(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        place = router.placer.place

        async def refuse(query: PlacementQuery) -> Placement:
            found = replace(await place(query), policy="baton", reason="late", ttft_seconds=9.0)
            raise PlacementRefused(Overloaded("the queue is long"), found)

        router.placer.place = refuse  # type: ignore[method-assign]
        refused = await client.post(COMPLETE, json={"prompt": "ab"})
        assert refused.status_code == 429
        explained = (await client.get("/admin/requests/cmpl-0")).json()
    assert (explained["prefill"], explained["decode"], explained["placements"]) == (None, None, [])
    assert (explained["policy"], explained["reason"]) == ("baton", "late")
    assert explained["predicted"]["ttft_seconds"] == 9.0
    assert explained["error"] == "the queue is long"
