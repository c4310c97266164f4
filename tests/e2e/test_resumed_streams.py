"""Tests that streams outlive their routers: a client that comes back gets the rest, token for
token, from the other router."""

import json
import os
import re
import signal
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import httpx
import pytest
import yaml

from baton.core.api_key import hash_api_key
from testkit.fakes.vllm_server import vllm_servers
from testkit.local_cluster import LocalCluster, local_cluster
from tests.documented_client import documented_client

pytestmark = pytest.mark.timeout(300)
KEY, STRANGER = "tenant-of-streams-00", "another-tenant-00000"
NUM_STREAMS, TOKENS, KILL_AFTER = 20, 200, 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    tenants = {"own": {"keys": [hash_api_key(KEY)]}, "other": {"keys": [hash_api_key(STRANGER)]}}
    path = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tenants": tenants}))
    settings: dict[str, object] = {"tenants_file": path, "routers": 2, "admin_key": "root"}
    with local_cluster(decode=2, settings=settings) as running:
        running.api_key = KEY
        yield running


def body_of(number: int, **fields: Any) -> dict[str, Any]:
    """Return the body of a stream: greedy for even numbers, sampled for odd ones."""
    sampling = {"temperature": 0} if number % 2 == 0 else {"temperature": 1, "seed": number}
    return {
        "prompt": list(range(10 + number, 90)),
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        **sampling,
        **fields,
    }


def tokens_of(events: Sequence[str]) -> list[int]:
    """Return the tokens of a whole stream."""
    assert events[-1] == "[DONE]"
    choices = [json.loads(each)["choices"][0] for each in events[:-1]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    return [token for choice in choices for token in choice.get("token_ids") or []]


def complete(cluster: LocalCluster, number: int) -> list[int]:
    body = body_of(number, stream=False)
    tokens: list[int] = cluster.post("/v1/completions", body)["choices"][0]["token_ids"]
    return tokens


def kill(cluster: LocalCluster, role: str) -> None:
    os.kill(cluster.processes(role)[0]["pid"], signal.SIGKILL)


def check_streams_survive(
    cluster: LocalCluster, roles: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill the first process of each role once all streams have begun."""
    cluster.wait_until_ready()
    open_stream, resumed = httpx.stream, []

    def open_counted(*arguments: Any, headers: dict[str, str], **fields: Any) -> Any:
        resumed.extend([headers["Last-Event-ID"]] if "Last-Event-ID" in headers else [])
        return open_stream(*arguments, headers=headers, **fields)

    monkeypatch.setattr(httpx, "stream", open_counted)
    resumable_stream = documented_client()
    have_begun = Barrier(NUM_STREAMS + 1)

    def stream(number: int) -> list[int]:
        headers = {"authorization": f"Bearer {KEY}"}
        events = []
        for data in resumable_stream(cluster.url + "/v1/completions", body_of(number), headers):
            events.append(data)
            if len(events) == KILL_AFTER:
                have_begun.wait()
        return tokens_of(events)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        expected = list(pool.map(partial(complete, cluster), range(NUM_STREAMS)))
        streams = [pool.submit(stream, number) for number in range(NUM_STREAMS)]
        have_begun.wait()
        for role in roles:
            kill(cluster, role)
        assert [each.result() for each in streams] == expected
    print(f"{len(resumed)} connections continued a stream")
    assert resumed


@pytest.mark.parametrize("roles", [("router",), ("router", "decode")])
def test_streams_survive_their_router(
    roles: Sequence[str], pair: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_streams_survive(pair, roles, monkeypatch)


def test_streams_of_attached_servers_survive_their_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers have vLLM's wire forms, and no model."""
    with vllm_servers() as thread:
        fakes = [thread.start("hub/model", token_seconds=0.01) for _ in range(2)]
        attach = ",".join(f"mixed={fake.url}" for fake in fakes)
        settings: dict[str, object] = {"attach": attach, "admission": "off", "routers": 2}
        with local_cluster(prefill=0, decode=0, mixed=2, settings=settings) as cluster:
            check_streams_survive(cluster, ["router", "mixed"], monkeypatch)


MESSAGES = [{"role": "user", "content": "Tell a long story about a list of numbers."}]
GREEDY = {"temperature": 0, "stream": True}
APIS = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": TOKENS, **GREEDY},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": TOKENS, "store": False, **GREEDY},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": TOKENS, "model": "demo", **GREEDY},
}


@pytest.mark.parametrize("path", APIS)
def test_a_stream_of_any_api_survives_the_death_of_all_routers(
    path: str, pair: LocalCluster
) -> None:
    """The stream has the events that it has without a death. The supervisor starts new routers."""
    pair.wait_until_ready()
    resumable_stream, headers = documented_client(), {"authorization": f"Bearer {KEY}"}
    streams: list[list[str]] = []
    for kills in (False, True):
        events = []
        for data in resumable_stream(pair.url + path, APIS[path], headers):
            events.append(without_ids(data))
            if kills and len(events) == KILL_AFTER:
                for router in pair.processes("router"):
                    os.kill(router["pid"], signal.SIGKILL)
        streams.append(events)
    assert streams[0] == streams[1]
    assert len(streams[0]) > 2 * KILL_AFTER


def without_ids(data: str) -> str:
    """Return an event without what differs between two answers to the same request."""
    named = re.sub(r"(chatcmpl-|msg_|resp_|rs_)\w+", "ID", data)
    counted = re.sub(r'"(cached_tokens|cache_read_input_tokens|input_tokens)":\d+', "", named)
    return re.sub(r'"(created|created_at|completed_at)":\d+', "", counted)


Events = list[tuple[str, str]]


def read(
    cluster: LocalCluster, headers: dict[str, str], body: dict[str, Any], last: str, limit: int
) -> Events:
    """Read up to ``limit`` events of a stream, with their ids, from after the event ``last``."""
    sent = {**headers, **({"last-event-id": last} if last else {})}
    url, found = cluster.url + "/v1/completions", Events()
    event_id = ""
    with httpx.stream("POST", url, json=body, headers=sent, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("id: "):
                event_id = line[4:]
            elif line.startswith("data: "):
                found.append((event_id, line[6:]))
                if len(found) == limit:
                    break
    return found


def test_a_client_may_come_back_twice(pair: LocalCluster) -> None:
    """It leaves its router each time. The seed is the cluster's."""
    pair.wait_until_ready()
    headers = {"authorization": f"Bearer {KEY}", "idempotency-key": str(uuid.uuid4())}
    body = body_of(1, seed=None)
    parts: Events = []
    for limit in (30, 50, TOKENS):
        parts += read(pair, headers, body, parts[-1][0] if parts else "", limit)
    whole = read(pair, headers, body, "", TOKENS * 2)
    assert parts == whole
    assert len(tokens_of([data for _, data in whole])) == TOKENS


def test_strangers_and_changed_bodies_get_nothing(pair: LocalCluster) -> None:
    pair.wait_until_ready()
    own = {"authorization": f"Bearer {KEY}", "idempotency-key": str(uuid.uuid4())}
    [(last, _)] = read(pair, own, body_of(0), "", 1)

    def refusal(body: dict[str, Any], **headers: str) -> tuple[int, str]:
        url = pair.url + "/v1/completions"
        answer = httpx.post(url, json=body, headers={**own, "last-event-id": last, **headers})
        return answer.status_code, answer.json()["error"]["code"]

    unknown = refusal(body_of(0), **{"idempotency-key": str(uuid.uuid4())})
    assert unknown == (404, "stream_not_found")
    assert refusal(body_of(0), authorization=f"Bearer {STRANGER}") == unknown
    assert refusal(body_of(2)) == (422, "idempotency_key_reused")
