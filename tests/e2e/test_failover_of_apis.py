"""Tests that streams of OpenAI's Responses API and of Anthropic's Messages API survive the death of
a worker: the client gets every event once, in order."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import httpx
import pytest

from testkit.local_cluster import LocalCluster, local_cluster
from tests.e2e.test_failures import pid_of

pytestmark = pytest.mark.timeout(300)
TEXT = "Tell a long story about a list of numbers and a function that sorts it."
TOKENS = 300
KILL_AFTER_DELTAS = 5
"""A delta has several tokens if the client is slower than the workers."""


@dataclass(frozen=True)
class Api:
    """An API: how to request a stream, which events carry text, and how to check the events that
    are numbered or repeat the text."""

    path: str
    body: dict[str, Any]
    delta_type: str
    text_of: Callable[[dict[str, Any]], str]
    check: Callable[[list[dict[str, Any]], str], None]


@dataclass
class Stream:
    """The events of a stream."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def types(self) -> list[str]:
        """Return the types in order, each run of the same type once: a delta may have several
        tokens."""
        return [kind for kind, _ in groupby(event["type"] for event in self.events)]


def check_responses(events: list[dict[str, Any]], text: str) -> None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = next(event for event in events if event["type"] == "response.output_text.done")
    response = events[-1]["response"]
    assert done["text"] == response["output"][0]["content"][0]["text"] == text
    assert response["usage"]["output_tokens"] == TOKENS
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {response["output"][0]["id"]}


def check_messages(events: list[dict[str, Any]], _text: str) -> None:
    assert {event["index"] for event in events if "index" in event} == {0}
    ended = events[-2]
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended["usage"]["output_tokens"] == TOKENS


APIS = {
    "responses": Api(
        "/v1/responses",
        {"input": TEXT, "max_output_tokens": TOKENS, "store": False, "ignore_eos": True},
        "response.output_text.delta",
        lambda event: event["delta"],
        check_responses,
    ),
    "messages": Api(
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": TEXT}],
            "max_tokens": TOKENS,
            "ignore_eos": True,
        },
        "content_block_delta",
        lambda event: event["delta"]["text"],
        check_messages,
    ),
}


@pytest.fixture(scope="module")
def fragile() -> Iterator[LocalCluster]:
    with local_cluster(prefill=2, decode=2) as running:
        yield running


def stream(cluster: LocalCluster, api: Api, killed_role: str | None = None) -> Stream:
    """Stream an answer. If ``killed_role`` is given, kill the worker of that role that serves it
    after ``KILL_AFTER_DELTAS`` deltas."""
    got = Stream()
    body = {"model": "demo", "stream": True, "temperature": 0, **api.body}
    url = cluster.url + api.path
    with httpx.Client(timeout=120) as client, client.stream("POST", url, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        request_id = answer.headers["x-baton-request-id"]
        num_deltas = 0
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["type"] == "ping":  # the failover took longer than usual
                continue
            got.events.append(event)
            num_deltas += event["type"] == api.delta_type
            if killed_role is not None and num_deltas == KILL_AFTER_DELTAS:
                os.kill(pid_of(cluster, killed_role, request_id), signal.SIGKILL)
                killed_role = None
    assert killed_role is None, "the stream ended before the worker was killed"
    return got


def text_of(api: Api, got: Stream) -> str:
    return "".join(api.text_of(event) for event in got.events if event["type"] == api.delta_type)


def output_tokens(got: Stream) -> int:
    """Return the number of tokens that the last event with a usage reports."""
    usages = [event.get("response", event).get("usage") for event in got.events]
    return int([usage for usage in usages if usage is not None][-1]["output_tokens"])


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("name", sorted(APIS))
def test_a_stream_survives_a_killed_worker(name: str, role: str, fragile: LocalCluster) -> None:
    api = APIS[name]
    fragile.wait_until_ready()
    expected = stream(fragile, api)
    text = text_of(api, expected)
    api.check(expected.events, text)
    disturbed = stream(fragile, api, killed_role=role)
    assert text_of(api, disturbed) == text
    api.check(disturbed.events, text)
    assert disturbed.types() == expected.types()
    assert output_tokens(disturbed) == output_tokens(expected)
    fragile.wait_until_ready()
    assert fragile.baton("check").returncode == 0
    assert any(process["restarts"] for process in fragile.processes(role))
