"""Tests tenants over HTTP: limits and their headers, request fields that depend on the tenant,
usage, and changed keys."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from baton.config import Settings
from baton.core.api_key import api_key_digest, hash_api_key
from baton.core.ids import TenantId
from baton.core.priority import Priority
from baton.core.request import PROMPT_PREFILLED, RequestOutput, RequestSpec
from baton.core.states import Role
from baton.core.task import Task
from baton.core.tenant import tenant_salt, tenant_tag
from baton.errors import Invalid, Unavailable
from baton.rpc.convert.common import spec_from_proto, spec_to_proto
from baton.serve.lifecycle import Lifecycle
from baton.text.tokenizer import Tokenizer
from router.openai.endpoints import COMPLETIONS
from router.program import RouterProgram
from router.responses.stored_response import StoredResponse, encode_items
from router.serving.request_handler import RequestHandler
from router.tenants.quota_share import UNSHARED
from router.tenants.tenant import Tenant, TenantLimits, TokenPrices
from router.tenants.tenant_directory import build_tenant_directory
from router.tenants.usage_store import MemoryUsageStore, UsageField
from testkit.fakes.registry import MemoryRegistry
from tests import router_harness
from tests.responses_harness import DictStore
from tests.router_harness import (
    CHAT,
    COMPLETE,
    RESPOND,
    RouterHarness,
    chat,
    events,
    open_harness,
    wrong_error,
)
from tests.unit.baton.engine.test_engine import Bench
from tests.unit.router import test_router_program
from tests.unit.router.http.test_router_connections import framed_worker as worker
from tests.unit.router.http.test_router_connections import member
from tests.unit.router.test_router_program import wait_until_ready

tokenizer = router_harness.tokenizer
settings = test_router_program.settings
registry = test_router_program.registry
SECRET = "s"


@asynccontextmanager
async def open_router(
    tokenizer: Tokenizer, *tenants: Tenant, **settings: Any
) -> AsyncIterator[tuple[RouterHarness, httpx.AsyncClient]]:
    """Open a router with ``tenants``; a tenant's API key is its name. At the end, all accounts must
    be idle."""
    directory = build_tenant_directory(
        {tenant.id: tenant for tenant in tenants},
        [(api_key_digest(tenant.id), tenant.id) for tenant in tenants],
        needs_keys=True,
    )
    async with open_harness(tokenizer, tenant_secret=SECRET, **settings) as (router, client):
        router.service.tenants.authenticator.set_directory(directory)
        yield router, client
        accounts = router.service.tenants.admission.quotas()
        assert all(account.is_idle for account in accounts.values())


def tenant(name: str, *limits: int | None, **fields: Any) -> Tenant:
    return Tenant(TenantId(name), limits=TenantLimits(*limits), **fields)


def of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def metric(router: RouterHarness, name: str, **labels: str) -> float | None:
    return router.service.telemetry.metrics.registry.get_sample_value(name, labels)


async def test_every_answer_has_rate_limit_headers(tokenizer: Tokenizer) -> None:
    async with open_router(tokenizer, tenant("a", 3, 100)) as (_, client):
        body = {"prompt": "ab", "max_tokens": 4}
        first = await client.post(COMPLETE, json=body, headers=of("a"))
        reported = {k: v for k, v in first.headers.items() if k.startswith("x-ratelimit")}
        assert reported.pop("x-ratelimit-reset-requests").endswith("s")
        assert reported.pop("x-ratelimit-reset-tokens").endswith("s")
        assert reported == {
            "x-ratelimit-limit-requests": "3",
            "x-ratelimit-remaining-requests": "2",
            "x-ratelimit-limit-tokens": "100",
            "x-ratelimit-remaining-tokens": "94",
        }
        stream = await client.post(COMPLETE, json=body | {"stream": True}, headers=of("a"))
        assert stream.headers["x-ratelimit-remaining-requests"] == "1"
        assert events(stream)
        wrong = await client.post(COMPLETE, json={"prompt": 5}, headers=of("a"))
        assert (wrong.status_code, wrong.headers["x-ratelimit-remaining-requests"]) == (400, "0")
        refused = await client.post(COMPLETE, json=body, headers=of("a"))
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert 1 <= int(refused.headers["retry-after-ms"]) <= 20_000


async def test_invalid_and_failed_requests_cost_no_tokens(tokenizer: Tokenizer) -> None:
    async with open_router(tokenizer, tenant("a", None, 50)) as (router, client):
        for body in (
            {"prompt": "ab", "n": 129},
            {"prompt": "ab" * 50},
            {"prompt": "a", "model": "?"},
        ):
            response = await client.post(COMPLETE, json=body, headers=of("a"))
            assert response.status_code in (400, 404)
        router.placer.decode.clear()  # no worker can be chosen
        body = {"prompt": "ab", "max_tokens": 40}
        failed = await client.post(COMPLETE, json=body, headers=of("a"))
        assert failed.status_code == 503
        router.placer.decode.append(router.decode)
        answer = await client.post(COMPLETE, json=body | {"max_tokens": 4}, headers=of("a"))
        assert answer.headers["x-ratelimit-remaining-tokens"] == "44"


@pytest.mark.parametrize("kind", ["continued", "compressed", "chunked"])
async def test_refusal_of_a_long_prompt_in_a_short_body_does_not_affect_shorter_prompts(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """After a request is refused for its number of tokens, requests of at least its size are
    refused unread. So a request's size must not be its ``content-length``, which is too small if
    the request continues a stored conversation or is compressed, and missing if it is chunked."""
    monkeypatch.setattr(router_harness, "CONTEXT", 1024)
    store, long = DictStore(), "x" * 600
    message = {"type": "message", "id": "msg_1", "role": "user", "content": long}
    stored = {"id": "resp_1", "status": "completed", "output": []}
    await store.put(TenantId("a"), StoredResponse(stored, encode_items([message])))

    async def parts() -> AsyncIterator[bytes]:
        yield json.dumps({"prompt": long, "max_tokens": 4}).encode()

    settings = {"response_store": store}
    async with open_router(tokenizer, tenant("a", None, 1000), **settings) as (_, client):

        async def ask() -> httpx.Response:
            if kind == "continued":
                body = {"input": "B", "previous_response_id": "resp_1", "max_output_tokens": 16}
                return await client.post(RESPOND, json=body, headers=of("a"))
            data = b"".join([part async for part in parts()])
            if kind == "compressed":
                headers = of("a") | {"content-encoding": "gzip"}
                return await client.post(COMPLETE, content=gzip.compress(data), headers=headers)
            return await client.post(COMPLETE, content=parts(), headers=of("a"))

        assert (await ask()).status_code == 200
        assert wrong_error(await ask(), 429)["type"] == "tokens"
        body = {"prompt": "y" * 150, "max_tokens": 4}  # more bytes than the refused request sent
        answer = await client.post(COMPLETE, json=body, headers=of("a"))
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("details", "num_answers", "paid"),
    [({PROMPT_PREFILLED: "true"}, 1, 7), ({}, 1, 0), ({PROMPT_PREFILLED: "true"}, 2, 7)],
)
async def test_computed_prompt_is_charged_even_without_an_answer(
    tokenizer: Tokenizer, details: dict[str, str], num_answers: int, paid: int
) -> None:
    """A prompt that was computed is charged even if no token was generated, for example because
    the request's grammar allows no first token. With several choices, it is charged once."""
    body: dict[str, Any] = {"prompt": "abcdefg", "max_tokens": 5, "n": num_answers}
    async with open_router(tokenizer, tenant("a", None, 50), automatic=False) as (router, client):
        task = asyncio.create_task(client.post(COMPLETE, json=body, headers=of("a")))
        await router_harness.eventually(lambda: len(router.prefill.jobs) == body["n"])
        router.prefill.fail_jobs("INVALID_ARGUMENT", "it allows no token", **details)
        assert (await task).status_code == 400
        used = {
            field: count
            for (_, _, field), count in router.service.tenants.usage_recorder.unsent().items()
        }
    assert used.get(UsageField.PROMPT, 0) == paid and UsageField.COMPLETION not in used


async def test_disconnected_client_gets_unused_tokens_back(tokenizer: Tokenizer) -> None:
    async with open_router(tokenizer, tenant("a", None, 60), automatic=False) as (router, client):
        body = {"prompt": "abcdef", "max_tokens": 40}
        task = asyncio.create_task(client.post(COMPLETE, json=body, headers=of("a")))
        await router_harness.eventually(lambda: bool(router.prefill.jobs))
        router.prefill.step()
        router.decode.step()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await router_harness.eventually(
            lambda: router.service.tenants.request_limiter.num_in_use == 0
        )
        [account] = router.service.tenants.admission.quotas().values()
        now = router.service.clock.monotonic()
        reported = account.headers(tenant("a", None, 60), UNSHARED, now)
        assert int(reported["x-ratelimit-remaining-tokens"]) >= 60 - 6 - 2


async def test_answer_without_max_tokens_reserves_few_tokens(tokenizer: Tokenizer) -> None:
    async with open_router(tokenizer, tenant("a", None, 1000), text="Hi") as (_, client):
        answer = await client.post(CHAT, json=chat(), headers=of("a"))
        used = answer.json()["usage"]["total_tokens"]
        again = await client.post(CHAT, json=chat(max_tokens=1), headers=of("a"))
        assert answer.status_code == again.status_code == 200
        remaining = int(again.headers["x-ratelimit-remaining-tokens"])
        assert remaining >= 1000 - 2 * used


async def test_request_carries_its_tenants_salt_priority_and_weight(tokenizer: Tokenizer) -> None:
    low = tenant("low", salt="club", priority=Priority.LOW, weight=3.0)
    high = tenant("high", salt="club", priority=Priority.HIGH)
    async with open_router(tokenizer, low, high, slo_ttft_seconds=2.0) as (router, client):

        async def ask(name: str, **fields: Any) -> RequestSpec:
            body = {"prompt": "abcdefgh", "max_tokens": 1, **fields}
            response = await client.post(COMPLETE, json=body, headers=of(name))
            assert response.status_code == 200, response.text
            return router.decode.submitted[-1].spec

        one, other = await ask("low"), await ask("high")
        assert one.tenant_salt == other.tenant_salt != tenant_salt(SECRET, TenantId("club"))
        assert one.tenant == tenant_tag(tenant_salt(SECRET, TenantId("low"))) != other.tenant
        assert (one.priority, one.weight) == (Priority.LOW, 3.0)
        assert (other.priority, other.weight) == (Priority.HIGH, 1.0)
        assert (one.ttft_slo_seconds, other.ttft_slo_seconds) == (0.0, 2.0)
        behind = await ask("high", priority=1, cache_salt="mine")
        assert (behind.priority, behind.tenant) == (Priority.NORMAL, other.tenant)
        assert behind.tenant_salt not in (
            other.tenant_salt,
            (await ask("low", cache_salt="x")).tenant_salt,
        )
        assert (await ask("low", cache_salt="mine")).tenant_salt == behind.tenant_salt
        before = await client.post(
            COMPLETE, json={"prompt": "a", "priority": -1}, headers=of("low")
        )
        assert before.status_code == 400
        assert before.json()["error"]["param"] == "priority"


async def test_quiet_tenant_is_computed_right_after_the_step_beside_a_flood(
    tokenizer: Tokenizer,
) -> None:
    """Requests of two tenants pass the router and the wire, and are computed by an engine with
    steps of 16 tokens. The flood's prompts have 16 tokens. Those of the quiet tenant are shorter,
    and arrive while the flood's wait."""
    async with open_router(tokenizer, tenant("flood"), tenant("quiet"), slo_ttft_seconds=2.0) as (
        router,
        client,
    ):

        async def ask(name: str, prompt: str) -> RequestSpec:
            body = {"prompt": prompt, "max_tokens": 2}
            response = await client.post(COMPLETE, json=body, headers=of(name))
            assert response.status_code == 200, response.text
            message = spec_to_proto(router.prefill.submitted[-1].spec)
            return spec_from_proto(type(message).FromString(message.SerializeToString()))

        flood = [await ask("flood", f"{number}" * 16) for number in range(8)]
        quiet = [await ask("quiet", prompt) for prompt in ("aaaaaa", "bbbb")]
    engine = Bench(num_blocks=64).engine
    for spec in flood:
        engine.add(spec, Task.PREFILL)
    computed = []
    for arriving in (None, quiet[0], None, quiet[1], *[None] * 5):
        if arriving is not None:
            engine.add(arriving, Task.PREFILL)
        outputs = engine.step().outputs
        computed.append([chr(find_spec(output, flood + quiet).token_ids[0]) for output in outputs])
        for output in outputs:
            engine.release_export(output.request_id)
    assert computed == [
        ["0"], ["a"], ["1"], ["b", "2"], ["3"], ["4"], ["5"], ["6"], ["7"]
    ]  # fmt: skip
    assert not engine.has_work()


def find_spec(output: RequestOutput, specs: list[RequestSpec]) -> RequestSpec:
    return next(spec for spec in specs if spec.request_id == output.request_id)


async def test_usage_is_counted_and_reported(tokenizer: Tokenizer) -> None:
    prices = TokenPrices(input=100.0, cached=10.0, output=1000.0)
    tenants = tenant("a", 2, prices=prices), tenant("b")
    async with open_router(tokenizer, *tenants) as (router, client):
        router.prefill.cached_tokens = router.decode.cached_tokens = 6
        body = {"prompt": "abcdefgh", "max_tokens": 4, "n": 2}
        for name in ("a", "a", "a", "b"):
            await client.post(COMPLETE, json=body, headers=of(name))
        reported = (await client.get("/admin/usage")).json()
        store = router.service.tenants.usage_store
        assert isinstance(store, MemoryUsageStore)
        assert reported["complete"] is True
        await router.service.tenants.usage_recorder.flush(store, "r/1")
        reported = (await client.get("/admin/usage", params={"since": reported["until"]})).json()
        assert reported["since"] == reported["until"]
        assert reported["tenants"]["a"] == {
            "requests": 2,
            "refused_requests": 1,
            "prompt_tokens": 16,
            "computed_tokens": 4,
            "cached_tokens": 12,
            "completion_tokens": 16,
            "cost": round((4 * 100 + 12 * 10 + 16 * 1000) / 1e6, 6),
        }
        assert reported["tenants"]["b"]["cost"] == 0
        assert reported["total"]["prompt_tokens"] == 24
        assert reported["total"]["cost"] == reported["tenants"]["a"]["cost"]
        assert metric(router, "baton_tenant_requests_total", tenant="a") == 2
        tokens = "baton_tenant_prompt_tokens_total"
        assert metric(router, tokens, tenant="a", source="cached") == 12
        assert metric(router, tokens, tenant="a", source="computed") == 4
        refusals = "baton_tenant_refusals_total"
        assert metric(router, refusals, tenant="a", reason="requests") == 1


async def test_usage_is_incomplete_without_redis(tokenizer: Tokenizer) -> None:
    async with open_router(tokenizer, tenant("a")) as (router, client):
        store = router.service.tenants.usage_store = MemoryUsageStore()

        async def gone(days: Any) -> Any:
            raise Unavailable("gone")

        store.read = gone  # type: ignore[method-assign]
        await client.post(COMPLETE, json={"prompt": "abc", "max_tokens": 1}, headers=of("a"))
        reported = (await client.get("/admin/usage")).json()
        assert (reported["complete"], reported["tenants"]["a"]["prompt_tokens"]) == (False, 3)


@pytest.mark.parametrize("since", ["yesterday", "1999-01-01", "2999-01-01", ""])
async def test_invalid_usage_dates_are_rejected(tokenizer: Tokenizer, since: str) -> None:
    async with open_router(tokenizer, tenant("a")) as (_, client):
        response = await client.get("/admin/usage", params={"since": since})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "since"


async def test_tenant_labels_in_metrics_are_bounded(tokenizer: Tokenizer, monkeypatch: Any) -> None:
    monkeypatch.setattr("router.tenants.metrics.MAX_TENANT_LABELS", 1)
    async with open_router(tokenizer, tenant("a"), tenant("b"), tenant("c")) as (router, client):
        for name in "abc":
            await client.post(COMPLETE, json={"prompt": "a", "max_tokens": 1}, headers=of(name))
        assert metric(router, "baton_tenant_requests_total", tenant="a") == 1
        assert metric(router, "baton_tenant_requests_total", tenant="other") == 2
        assert metric(router, "baton_tenant_requests_total", tenant="b") is None


async def test_openais_client_understands_rate_limits(tokenizer: Tokenizer) -> None:
    async with open_router(tokenizer, tenant("a", 1)) as (_, http):
        client = openai.AsyncOpenAI(
            api_key="a", base_url="http://test/v1", http_client=http, max_retries=0
        )
        fields: dict[str, Any] = {"model": "demo", "prompt": "a", "max_tokens": 1}
        raw = await client.completions.with_raw_response.create(**fields)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**fields)
        assert caught.value.code == "rate_limit_exceeded"
        assert caught.value.type == "requests"
        assert int(caught.value.response.headers["retry-after-ms"]) > 50_000


async def test_router_reloads_changed_keys_while_it_runs(
    settings: Settings, registry: MemoryRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.tenants.tenants_file_watcher.TENANTS_FILE_POLL_SECONDS", 0.02)
    path = tmp_path / "tenants.yaml"
    path.write_text(f"tenants: {{a: {{keys: ['{hash_api_key('first')}']}}}}")
    program = RouterProgram(settings.model_copy(update={"tenants_file": str(path)}))
    lifecycle = Lifecycle(program, 5)
    async with worker() as (_, ref, _), httpx.AsyncClient() as client:
        await registry.announce(member("w", Role.DECODE, framed_address=ref.framed_address), 60)
        living = asyncio.create_task(lifecycle.run())
        await wait_until_ready(registry)
        url = f"http://{program.address}/v1/models"

        async def status(key: str) -> int:
            return (await client.get(url, headers=of(key))).status_code

        async def until(key: str, wanted: int) -> None:
            async with asyncio.timeout(60):
                while await status(key) != wanted:
                    await asyncio.sleep(0.01)

        assert (await status("first"), await status("second")) == (200, 401)
        path.write_text(f"tenants: {{a: {{keys: ['{hash_api_key('second')}']}}}}")
        await until("second", 200)
        assert await status("first") == 401
        path.write_text("tenants: {a: {keys: [oops]}}")
        await asyncio.sleep(0.1)
        assert await status("second") == 200
        lifecycle.request_stop()
        await living


async def test_router_with_an_invalid_tenants_file_does_not_start(
    settings: Settings, registry: MemoryRegistry, tmp_path: Path
) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(json.dumps({"tenants": {"a": {"weigth": 1}}}))
    program = RouterProgram(settings.model_copy(update={"tenants_file": str(path)}))
    with pytest.raises(Invalid, match=r"tenants.yaml: tenant 'a': unknown field 'weigth'"):
        await program.start()
    await program.stop()


async def test_batch_requests_have_lowest_priority_and_use_no_limits(tokenizer: Tokenizer) -> None:
    high = tenant("a", 1, 20, 1, priority=Priority.HIGH)
    async with open_router(tokenizer, high) as (router, client):
        body = {"prompt": "abcdefgh", "max_tokens": 2}
        for _ in range(3):
            handler = RequestHandler(router.service, COMPLETIONS)
            data = json.dumps(body).encode()
            status, _ = await handler.answer_batch_request(lambda data=data: data, high.id)
            assert status == 200
            assert router.decode.submitted[-1].spec.priority is Priority.BATCH
        answer = await client.post(COMPLETE, json=body, headers=of("a"))
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-remaining-tokens"] == "10"
        assert router.decode.submitted[-1].spec.priority is Priority.HIGH
        assert metric(router, "baton_tenant_requests_total", tenant="a") == 4
