"""Tests the budget of logprobs that a router keeps for requests that are not answered yet."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from baton.core.ids import NO_TENANT, TenantId
from baton.text.tokenizer import Tokenizer
from router.serving.memory_budgets import MAX_KEPT_LOGPROBS, MAX_REQUEST_LOGPROBS, LogprobsBudget
from testkit.fakes.workers import FakeWorker
from tests.responses_harness import response_events
from tests.router_harness import (
    CHAT,
    COMPLETE,
    RESPOND,
    RouterHarness,
    chat,
    eventually,
    open_harness,
    serve_over_tcp,
    tokenizer,
    wrong_error,
)

__all__ = ["tokenizer"]

ADVICE = (
    "; retry later, ask for fewer alternatives (top_logprobs, logprobs, prompt_logprobs), or "
    "stream a chat or completion, for which no logprobs of the answer are kept"
)

SCORED: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_tokens": 5}
"""Keeps 15 logprobs: three per token."""

SCORED_RESPONSE: dict[str, Any] = {
    "model": "demo", "input": "Hi", "top_logprobs": 2, "max_output_tokens": 16,
    "include": ["message.output_text.logprobs"],
}  # fmt: skip


def set_budget(router: RouterHarness, limit: int, request_limit: int = 1000) -> LogprobsBudget:
    budget = LogprobsBudget(limit, request_limit)
    router.service.resources.logprobs_budget = budget
    return budget


@contextmanager
def held(budget: LogprobsBudget, count: int, tenant: TenantId = NO_TENANT) -> Iterator[None]:
    with budget.new_request(tenant, 1.0, "logprobs", shared=False) as other:
        other.charge(count)
        yield


def test_one_request_may_keep_half_of_the_budget() -> None:
    assert (MAX_KEPT_LOGPROBS, MAX_REQUEST_LOGPROBS) == (524_288, 262_144)


@pytest.mark.parametrize("n", [1, 3])
async def test_whole_answer_beyond_the_budget_is_refused(tokenizer: Tokenizer, n: int) -> None:
    body = chat(**SCORED, n=n)
    async with open_harness(tokenizer) as (router, client):
        budget = set_budget(router, limit=10 + 15 * n)
        with held(budget, 11):
            response = await client.post(CHAT, json=body)
            error = wrong_error(response, 429)
            assert budget.num_in_use == 11
        assert (await client.post(CHAT, json=body)).status_code == 200
        assert budget.num_in_use == 0
    full = 10 + 15 * n
    assert error["type"] == "rate_limit_error"
    assert error["message"] == (
        f"this router handles {full - 2} logprobs of unfinished requests now, and 3 more would "
        f"exceed its limit of {full}{ADVICE}"
    )
    assert int(response.headers["retry-after"]) >= 1


async def test_logprobs_are_kept_from_their_token_to_the_end(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, automatic=False) as (router, client):
        budget = set_budget(router, limit=15)
        task = asyncio.create_task(client.post(CHAT, json=chat(**SCORED)))
        await eventually(lambda: bool(router.decode.jobs))
        assert budget.num_in_use == 0

        async def kept_after_step(worker: FakeWorker) -> int:
            before = budget.num_in_use
            worker.step()
            await eventually(lambda: budget.num_in_use != before)
            return budget.num_in_use

        workers = (router.prefill, *[router.decode] * 3)
        assert [await kept_after_step(worker) for worker in workers] == [3, 6, 9, 12]
        router.decode.step()
        assert (await task).status_code == 200
        assert budget.num_in_use == 0


async def test_streams_of_chats_and_completions_keep_none(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        set_budget(router, limit=0)
        for path, body in (
            (CHAT, chat(**SCORED)),
            (COMPLETE, {"prompt": "x", "logprobs": 2, "max_tokens": 5}),
        ):
            wrong_error(await client.post(path, json=body), 429)
            response = await client.post(path, json={**body, "stream": True})
            assert response.status_code == 200
            assert response.text.endswith("data: [DONE]\n\n")
            assert "error" not in response.text


async def test_answers_without_logprobs_keep_none(tokenizer: Tokenizer) -> None:
    """``best_of`` makes workers send logprobs, but the client does not get them."""
    async with open_harness(tokenizer) as (router, client):
        set_budget(router, limit=0, request_limit=0)
        ranked = {"prompt": "x", "best_of": 4, "max_tokens": 5}
        assert (await client.post(COMPLETE, json=ranked)).status_code == 200
        assert {job.spec.sampling.logprobs for job in router.decode.submitted} == {0}
        assert (await client.post(CHAT, json=chat())).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat(**SCORED), "top_logprobs"),
        (COMPLETE, {"prompt": "x", "logprobs": 2, "max_tokens": 5}, "logprobs"),
        (RESPOND, SCORED_RESPONSE, "top_logprobs"),
    ],
)
async def test_request_that_can_never_fit_is_invalid(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], param: str
) -> None:
    async with open_harness(tokenizer) as (router, client):
        budget = set_budget(router, limit=1000, request_limit=14)
        error = wrong_error(await client.post(path, json=body), 400)
        assert budget.num_in_use == 0
    assert error["param"] == param
    assert error["message"] == (
        f"{param}: the request has more than 14 logprobs, alternatives included, which is the most "
        f"that is kept for one request; ask for fewer answers, tokens or {param}, or stream a chat "
        "or completion, for which no logprobs of the answer are kept"
    )


async def test_streamed_response_keeps_its_logprobs(tokenizer: Tokenizer) -> None:
    body = {**SCORED_RESPONSE, "stream": True}
    async with open_harness(tokenizer) as (router, client):
        budget = set_budget(router, limit=3 * 15)  # 14 bytes of text and EOS
        done = response_events(await client.post(RESPOND, json=body))[-1]
        assert done["type"] == "response.completed"
        with held(budget, 1):
            failed = response_events(await client.post(RESPOND, json=body))[-1]
            assert budget.num_in_use == 1
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"]["code"] == "rate_limit_exceeded"
        assert failed["response"]["error"]["message"] == (
            "this router handles 43 logprobs of unfinished requests now, and 3 more would exceed "
            f"its limit of 45{ADVICE}"
        )


async def test_background_response_keeps_its_logprobs_until_it_is_stored(
    tokenizer: Tokenizer,
) -> None:
    async with open_harness(tokenizer, automatic=False, stores_responses=True) as (router, client):
        budget, service = set_budget(router, limit=3 * 15), router.response_service
        assert service is not None
        tasks = asyncio.create_task(service.background.run())
        await asyncio.sleep(0)

        async def respond() -> str:
            answer = await client.post(RESPOND, json={**SCORED_RESPONSE, "background": True})
            assert answer.json()["status"] == "queued"
            await eventually(lambda: bool(router.decode.jobs))
            router.prefill.step()
            router.decode.step()
            await eventually(lambda: budget.num_in_use >= 6)
            return str(answer.json()["id"])

        async def result(response_id: str) -> dict[str, Any]:
            while service.background.num_running:
                router.decode.step()
                await asyncio.sleep(0)
            assert budget.num_in_use == 0
            return dict((await client.get(f"{RESPOND}/{response_id}")).json())

        first = await respond()
        assert budget.num_in_use == 6
        assert (await result(first))["status"] == "completed"
        second = await respond()
        with held(budget, 37):
            while service.background.num_running:
                router.decode.step()
                await asyncio.sleep(0)
        failed = await result(second)
        assert failed["status"] == "failed"
        assert failed["error"]["message"].startswith("this router handles 43 logprobs of")
        tasks.cancel()
        await asyncio.wait([tasks])


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat(**SCORED)), (RESPOND, {**SCORED_RESPONSE, "stream": True})]
)
async def test_disconnect_returns_the_logprobs(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    router = RouterHarness(tokenizer, "Hello, wörld!", automatic=False)
    budget = set_budget(router, limit=100)
    async with serve_over_tcp(router) as url, httpx.AsyncClient() as client:
        task = asyncio.create_task(client.post(url + path, json=body))
        await eventually(lambda: bool(router.decode.jobs))
        router.prefill.step()
        router.decode.step()
        await eventually(lambda: budget.num_in_use == 6)
        task.cancel()
        await asyncio.wait([task])
        await eventually(lambda: router.service.tenants.request_limiter.num_in_use == 0)
        assert budget.num_in_use == 0
        assert router.prefill.jobs == router.decode.jobs == []


async def test_failed_generation_returns_the_logprobs(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, automatic=False) as (router, client):
        budget = set_budget(router, limit=100)
        task = asyncio.create_task(client.post(CHAT, json=chat(**SCORED)))
        await eventually(lambda: bool(router.decode.jobs))
        router.prefill.step()
        await eventually(lambda: budget.num_in_use == 3)
        router.decode.fail_jobs("INVALID_ARGUMENT", "went wrong")
        wrong_error(await task, 400)
        assert budget.num_in_use == 0


async def test_tenant_can_not_take_the_share_of_another(tokenizer: Tokenizer) -> None:
    alice, bob = {"authorization": "Bearer sk-a"}, {"authorization": "Bearer sk-b"}
    keys = {"sk-a": "alice", "sk-b": "bob"}
    async with open_harness(tokenizer, api_keys=keys) as (router, client):
        budget = set_budget(router, limit=60)
        with held(budget, 31, TenantId("alice")):
            refused = await client.post(CHAT, json=chat(**SCORED), headers=alice)
            assert budget.num_in_use == 31
            assert (await client.post(CHAT, json=chat(**SCORED), headers=bob)).status_code == 200
        assert (await client.post(CHAT, json=chat(**SCORED), headers=alice)).status_code == 200
        assert budget.num_in_use == 0
    assert wrong_error(refused, 429)["message"] == (
        "this router handles 43 logprobs of unfinished requests of this tenant now, and the rest "
        f"of the limit of 60 is reserved for other tenants{ADVICE}"
    )
