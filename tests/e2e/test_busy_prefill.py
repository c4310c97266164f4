"""Tests that requests wait in the queue of a busy prefill worker for longer than the time-out of
the first token: none of them is placed twice, and streams are kept alive by pings."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from router.http.response_writer import FIRST_BYTE_SECONDS
from testkit.local_cluster import REQUEST_SECONDS, LocalCluster, local_cluster

pytestmark = pytest.mark.timeout(300)
TIMEOUT_SECONDS = FIRST_BYTE_SECONDS - 0.5
"""A stream that begins with a ping has waited for longer. No worker should be kept from running for
so long, even on a busy machine."""

PROMPT_TOKENS, ANSWER_TOKENS = 2500, 8
NUM_PROMPTS, MAX_PROMPTS = 9, 288
NUM_STREAMED = 3
"""The last prompts are streamed."""

PING = ": ping"


@dataclass
class Answer:
    request_id: str
    tokens: list[int]
    begins_with_ping: bool = False


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    settings: dict[str, object] = {
        "first_token_timeout_seconds": TIMEOUT_SECONDS,
        "max_batched_tokens": 128,  # so that a step is much shorter than the time-outs
        "deterministic": True,
    }
    with local_cluster(settings=settings) as running:
        yield running


def request_body(number: int, **fields: Any) -> dict[str, Any]:
    """Return a request with the prompt of this number."""
    return {
        "prompt": np.random.default_rng(number).integers(10, 250, PROMPT_TOKENS).tolist(),
        "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip


def complete(cluster: LocalCluster, number: int, **fields: Any) -> Answer:
    body = request_body(number, **fields)
    answer, headers = cluster.post_with_headers("/v1/completions", body)
    return Answer(headers["x-baton-request-id"], answer["choices"][0]["token_ids"])


def stream(cluster: LocalCluster, number: int) -> Answer:
    body, url = request_body(number, stream=True), cluster.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=REQUEST_SECONDS) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    events = [line for line in lines if line != PING]
    assert events.pop() == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"] for event in events]
    tokens = [token for (choice,) in choices for token in choice["token_ids"]]
    return Answer(response.headers["x-baton-request-id"], tokens, lines[0] == PING)


def fill_queue(cluster: LocalCluster, numbers: range) -> list[Answer]:
    """Send the prompts of these numbers at once, and return their answers."""
    with ThreadPoolExecutor(len(numbers)) as pool:
        asked = [pool.submit(complete, cluster, each) for each in numbers[:-NUM_STREAMED]]
        asked += [pool.submit(stream, cluster, each) for each in numbers[-NUM_STREAMED:]]
        return [each.result() for each in asked]


def test_requests_in_a_long_queue_are_placed_once_and_their_streams_get_pings(
    cluster: LocalCluster,
) -> None:
    """If the machine is so fast that no stream waits for a ping, twice as many prompts are sent."""
    complete(cluster, MAX_PROMPTS * 2)  # the first steps of new processes may take seconds
    numbers = range(NUM_PROMPTS)
    answers = fill_queue(cluster, numbers)
    while not any(answer.begins_with_ping for answer in answers):
        numbers = range(numbers.stop, numbers.stop + 2 * len(numbers))
        assert len(numbers) <= MAX_PROMPTS, "no stream began with a ping"
        answers = fill_queue(cluster, numbers)
    records = [cluster.get(f"/admin/requests/{answer.request_id}") for answer in answers]
    errors = [[each["error"] for each in record["placements"]] for record in records]
    assert errors == [[""]] * len(numbers)
    assert max(record["actual"]["ttft_seconds"] for record in records) > TIMEOUT_SECONDS
    # Another salt keeps the reference from using the KV of the answers that it is compared with.
    alone = [complete(cluster, number, cache_salt="alone") for number in numbers[-NUM_PROMPTS:]]
    assert [each.tokens for each in answers[-NUM_PROMPTS:]] == [each.tokens for each in alone]
    assert [len(answer.tokens) for answer in answers] == [ANSWER_TOKENS] * len(numbers)
    assert cluster.baton("check").returncode == 0
