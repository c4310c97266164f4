"""Tests what the router's metrics count (a request once, a prompt once, or each answer), and that
their series exist before anything has happened."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from prometheus_client.samples import Sample

from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestOutput
from baton.text.tokenizer import Tokenizer
from router.app import handler_factories
from router.generation.record import GenerationRecord
from router.telemetry.metrics import ENDPOINTS, RouterMetrics
from tests import router_harness
from tests.router_harness import CHAT, COMPLETE, RESPOND, RouterHarness, chat, events, open_harness

tokenizer = router_harness.tokenizer


def value(router: RouterHarness, name: str, **labels: str) -> float | None:
    registry = router.service.telemetry.metrics.registry
    return registry.get_sample_value(name, {"model": "demo", **labels})


def counts(router: RouterHarness) -> dict[str, float | None]:
    """Return the counters of model ``demo`` by which a client's counts are checked."""
    return {
        "requests": value(router, "baton_request_seconds_count"),
        "first tokens": value(router, "baton_time_to_first_token_seconds_count"),
        "prompt": value(router, "baton_prompt_tokens_total"),
        "cached": value(router, "baton_cached_tokens_total", tier="device"),
        "completion": value(router, "baton_completion_tokens_total"),
        "answers": value(router, "baton_answers_total", reason="stop"),
        "met": value(router, "baton_slo_answers_total", verdict="met"),
    }


@pytest.mark.parametrize(
    ("path", "body", "num_answers", "per_request"),
    [
        (CHAT, chat(), 1, 1),
        (CHAT, chat(n=4), 4, 1),
        (CHAT, chat(n=4, stream=True, stream_options={"include_usage": True}), 4, 1),
        (COMPLETE, {"prompt": "Hi there", "best_of": 3, "n": 2}, 3, 1),
        (COMPLETE, {"prompt": ["Hi there", "Hi"], "n": 2}, 4, 1),
    ],
)
async def test_a_prompt_counts_once_and_each_answer_counts(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], num_answers: int, per_request: int
) -> None:
    async with open_harness(tokenizer) as (router, client):
        router.prefill.cached_tokens = 2
        response = await client.post(path, json=body)
        found = counts(router)
    usage = events(response)[-2]["usage"] if body.get("stream") else response.json()["usage"]
    assert found == {
        "requests": per_request,
        "first tokens": per_request,
        "prompt": usage["prompt_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
        "completion": usage["completion_tokens"],
        "answers": num_answers,
        "met": num_answers,
    }


def answered(number: int, cached: int, first: float) -> GenerationRecord:
    """Return the record of an answer of one token to a prompt of 41 tokens. ``first`` is its TTFT
    in seconds; of its cached tokens, up to 16 came from the store's DRAM."""
    record = GenerationRecord(RequestId(f"r-{number}"), 10.0, 41, model="m")
    output = RequestOutput(
        RequestId(f"r-{number}"),
        Epoch(1),
        0,
        (TokenId(1),),
        cached_tokens=cached,
        details={"cached_dram": "16"},
    )
    record.record_output(output, 10.0 + first)
    record.record_end("length", 10.0 + 2 * first)
    return record


@pytest.mark.parametrize(
    ("cached", "per_prompt", "by_tier"),
    [
        ((0, 40, 40, 40), 4, {"device": 0, "dram": 0}),
        ((40, 40, 32, 40), 4, {"device": 16, "dram": 16}),
        ((0, 40, 40, 40), 2, {"device": 24, "dram": 16}),
        ((0, 40, 40, 40), 1, {"device": 72, "dram": 48}),
    ],
)
def test_cached_tokens_are_those_of_all_answers_to_a_prompt(
    cached: Sequence[int], per_prompt: int, by_tier: dict[str, int]
) -> None:
    metrics = RouterMetrics()
    metrics.add_models(["m"])
    records = [answered(number, tokens, 1.0 + number) for number, tokens in enumerate(cached)]
    metrics.record_request(records, per_prompt)
    read = partial(metrics.registry.get_sample_value, labels={"model": "m"})
    assert read("baton_prompt_tokens_total") == 41 * len(cached) / per_prompt
    assert by_tier == {
        tier: metrics.registry.get_sample_value(
            "baton_cached_tokens_total", {"model": "m", "tier": tier}
        )
        for tier in by_tier
    }
    assert read("baton_time_to_first_token_seconds_count") == 1
    assert read("baton_time_to_first_token_seconds_sum") == 1.0
    assert read("baton_request_seconds_sum") == 8.0


async def test_requests_count_by_model_and_status(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        for model in ("demo", "/models/demo", "other", "another"):
            await client.post(CHAT, json=chat() | {"model": model})
        await client.post(CHAT, content=b"{")
        await client.post(RESPOND, json={"model": "demo", "input": 5})
        read = router.service.telemetry.metrics.registry.get_sample_value
        found = {
            (endpoint, model, status): read(
                "baton_requests_total", {"endpoint": endpoint, "model": model, "status": status}
            )
            for endpoint, model, status in (
                ("chat", "demo", "200"),
                ("chat", "unknown", "404"),
                ("chat", "unknown", "400"),
                ("responses", "unknown", "400"),
                ("responses", "demo", "400"),
                ("messages", "demo", "500"),
            )
        }
    assert list(found.values()) == [2, 2, 1, 1, 0, 0]


def samples_of(metrics: RouterMetrics) -> list[Sample]:
    """Return all samples but the times at which series were created."""
    families = metrics.registry.collect()
    return [s for family in families for s in family.samples if not s.name.endswith("_created")]


def test_all_series_of_a_model_exist_at_zero() -> None:
    metrics = RouterMetrics()
    metrics.add_models(["a", "b"])
    samples = samples_of(metrics)
    assert {s.value for s in samples} == {0}
    by_model = {
        model: [
            (s.name, sorted((k, v) for k, v in s.labels.items() if k != "model"))
            for s in samples
            if s.labels.get("model") == model
        ]
        for model in ("a", "b")
    }
    assert by_model["a"] == by_model["b"]
    record = answered(0, 40, 1.0)
    record.model = "a"
    metrics.record_begin(record)
    metrics.record_answer(record)
    metrics.record_request([record], 1)
    metrics.record_http_request("chat", "a", 429)
    now = [s for s in samples_of(metrics) if "tenant" not in s.labels]
    assert len(now) == len(samples)


async def test_every_endpoint_has_series(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, _):
        handlers = [new() for new in handler_factories(router.service, None).values()]
    assert {handler.endpoint.name for handler in handlers} | {"batches"} == set(ENDPOINTS)
