"""Tests requests that go whole through a cluster to the API of attached servers: embeddings,
scores, audio, and chats with images. The servers have vLLM's wire forms, and no model."""

import hashlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from email import message_from_bytes
from itertools import count
from typing import Any

import pytest

from baton.core.server_api import CHATS, COMPLETIONS, KNOWN_PATHS, SERVER_ROUTES, hashed_salt
from testkit.fakes.vllm_routes import CHAT_WORDS, chat_words, embedding
from testkit.fakes.vllm_server import MODEL, FakeVllm, FakeVllmThread, vllm_servers
from testkit.local_cluster import LocalCluster, local_cluster

pytestmark = pytest.mark.timeout(240)
KEY, LIMITED_KEY = "key-of-a-tenant-without-limits", "key-of-a-tenant-with-few-tokens"
EMBEDDINGS = "/v1/embeddings"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
BOUNDARY = "the-boundary"
FORM = f"multipart/form-data; boundary={BOUNDARY}"

Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture(scope="module")
def thread() -> Iterator[FakeVllmThread]:
    with vllm_servers() as thread:
        yield thread


@pytest.fixture(scope="module")
def servers(thread: FakeVllmThread) -> list[FakeVllm]:
    return [thread.start("hub/model", paths=KNOWN_PATHS) for _ in range(2)]


@pytest.fixture(scope="module")
def cluster(
    servers: list[FakeVllm], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """A cluster over both servers, for two tenants."""
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    hashed = {key: hashlib.sha256(key.encode()).hexdigest() for key in (KEY, LIMITED_KEY)}
    tenants.write_text(
        f"tenants:\n  free:\n    keys: ['sha256:{hashed[KEY]}']\n"
        f"  limited:\n    keys: ['sha256:{hashed[LIMITED_KEY]}']\n"
        "    limits: {tokens_per_minute: 100}\n"
    )
    settings: dict[str, object] = {
        "attach": ",".join(f"mixed={server.url}" for server in servers),
        "admission": "off",
        "tenants_file": tenants,
        "tenant_secret": "secret",
    }
    with local_cluster(prefill=0, decode=0, mixed=2, settings=settings) as running:
        running.api_key = KEY
        yield running


@pytest.fixture(autouse=True)
def working(request: pytest.FixtureRequest, thread: FakeVllmThread) -> Iterator[None]:
    """After each test, the servers work as at first."""
    yield
    if "servers" in request.fixturenames:
        for server in request.getfixturevalue("servers"):
            server.refusal, server.failure_status, server.end_after = "", 0, None
            thread.call(server.answers.set)
            thread.call(server.step.set)


def post(
    cluster: LocalCluster,
    path: str,
    body: dict[str, Any] | bytes,
    key: str = KEY,
    content_type: str = "application/json",
) -> Answer:
    """Send a request; return the answer's status, headers and body, whatever they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": content_type, "authorization": f"Bearer {key}"}
    request = urllib.request.Request(cluster.url + path, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status, answered, text = response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        status, answered, text = error.code, error.headers, error.read()
    return status, {name.lower(): value for name, value in answered.items()}, text


def error_of(answer: Answer) -> str:
    return str(json.loads(answer[2])["error"]["message"])


def chat_with_image(*texts: str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": text} for text in texts or ("What is it?",)]
    return {"messages": [{"role": "user", "content": [*content, IMAGE]}], **fields}


def form(model: str, **fields: str) -> bytes:
    parts = [f'name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
    parts.append(b'name="file"; filename="a.wav"\r\ncontent-type: audio/wav\r\n\r\nRIFF\r\n--\x00')
    parts.append(f'name="model"\r\n\r\n{model}'.encode())
    start = f"--{BOUNDARY}\r\ncontent-disposition: form-data; ".encode()
    return b"".join(start + part + b"\r\n" for part in parts) + f"--{BOUNDARY}--\r\n".encode()


def received(servers: list[FakeVllm]) -> list[Any]:
    return [request for server in servers for request in server.route_requests]


def model_of(cluster: LocalCluster) -> dict[str, Any]:
    request = urllib.request.Request(cluster.url + "/v1/models")
    request.add_header("authorization", f"Bearer {KEY}")
    with urllib.request.urlopen(request) as response:
        return dict(json.load(response)["data"][0])


@pytest.mark.parametrize(
    "path", [path for path, route in SERVER_ROUTES.items() if not route.is_form]
)
def test_each_route_answers_as_its_server(
    cluster: LocalCluster, servers: list[FakeVllm], path: str
) -> None:
    body = {"input": ["a", "hello"], "odd_field": {"kept": [1.5, "é"]}}
    status, headers, answer = post(cluster, path, body | {"model": model_of(cluster)["id"]})
    vectors = [embedding(text) for text in body["input"]]
    assert (status, headers["content-type"]) == (200, "application/json")
    assert [each["embedding"] for each in json.loads(answer)["data"]] == vectors
    [sent] = [each for each in received(servers) if each.path == path and b"kept" in each.body]
    given = sent.json
    assert len(given.pop("cache_salt")) == 32
    assert given == body | {"model": MODEL}
    assert "authorization" not in sent.headers
    assert headers["x-baton-decode"] in ("mixed-0", "mixed-1")


@pytest.mark.parametrize("path", [path for path, route in SERVER_ROUTES.items() if route.is_form])
def test_forms_pass_with_the_servers_name_of_the_model(
    cluster: LocalCluster, servers: list[FakeVllm], path: str
) -> None:
    given = form(model_of(cluster)["id"], language="de", response_format="json")
    status, _, answer = post(cluster, path, given, content_type=FORM)
    [sent] = [each for each in received(servers) if each.path == path]
    start = b"content-type: %b\n\n" % sent.headers["content-type"].encode()
    parts = message_from_bytes(start + sent.body).get_payload()
    values = {
        part.get_param("name", header="content-disposition"): part.get_payload(decode=True)
        for part in parts
    }
    fields = {"language": b"de", "response_format": b"json", "model": MODEL.encode()}
    assert values == fields | {"file": b"RIFF\r\n--\x00"}
    assert (status, json.loads(answer)["text"]) == (200, f"{len(sent.body)} bytes")
    status, _, answer = post(cluster, path, {"file": ""})
    assert status == 415


def test_models_say_what_they_can_do(cluster: LocalCluster) -> None:
    own = {"/v1/messages", "/v1/responses"}
    assert set(model_of(cluster)["capabilities"]) == {*KNOWN_PATHS, *own}


def test_a_chat_with_an_image_is_the_servers(
    cluster: LocalCluster, servers: list[FakeVllm]
) -> None:
    before = usage_of(cluster, "free")
    status, headers, answer = post(cluster, CHATS, chat_with_image("whole", max_tokens=20))
    body = json.loads(answer)
    assert (status, body["choices"][0]["message"]["content"]) == (200, "".join(chat_words()))
    after = usage_of(cluster, "free")
    spent = {name: after[name] - before[name] for name in before}
    usage = body["usage"]
    assert (spent["requests"], spent["completion_tokens"]) == (1, CHAT_WORDS)
    assert (spent["prompt_tokens"], spent["cached_tokens"]) == (usage["prompt_tokens"], 2)
    explained = explain(cluster, headers["x-baton-request-id"])
    assert explained["finish_reason"] == "stop"
    assert explained["prompt_tokens"] == usage["prompt_tokens"]
    assert len(servers_with(servers, "whole")) == 1
    text = {"messages": [{"role": "user", "content": '"image_url"'}], "max_tokens": 2}
    assert post(cluster, CHATS, text)[0] == 200
    assert servers_with(servers, '\\"image_url') == []  # its tokens were sent


def usage_of(cluster: LocalCluster, tenant: str) -> dict[str, Any]:
    usage = json.loads(cluster.baton("usage", "--json").stdout)
    none = dict.fromkeys(("requests", "prompt_tokens", "cached_tokens", "completion_tokens"), 0)
    return {**none, **usage["tenants"].get(tenant, {})}


def explain(cluster: LocalCluster, request_id: str) -> dict[str, Any]:
    return dict(json.loads(cluster.baton("explain", request_id, "--json").stdout))


@pytest.mark.parametrize("wants_usage", [False, True])
def test_a_stream_passes_as_it_is(cluster: LocalCluster, wants_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if wants_usage else {}
    status, headers, answer = post(cluster, CHATS, chat_with_image(stream=True, **options))
    *events, last, nothing = answer.split(b"\n\n")
    parsed = [json.loads(each.removeprefix(b"data: ")) for each in events]
    assert (status, last, nothing) == (200, b"data: [DONE]", b"")
    assert headers["content-type"].startswith("text/event-stream")
    words = [each["choices"][0]["delta"]["content"] for each in parsed if each["choices"]]
    assert words == chat_words()
    assert [bool(each.get("usage")) for each in parsed] == CHAT_WORDS * [False] + wants_usage * [
        True
    ]


def test_the_servers_refusal_reaches_the_client(
    cluster: LocalCluster, servers: list[FakeVllm]
) -> None:
    for server in servers:
        server.refusal = "At most 0 image(s) may be provided"
    status, headers, answer = post(cluster, CHATS, chat_with_image(stream=True))
    assert (status, headers["content-type"]) == (400, "application/json")
    assert json.loads(answer) == {"error": {"message": servers[0].refusal}}


@pytest.mark.parametrize("given", [{"kv_transfer_params": {"do_remote_decode": True}}])
def test_parameters_of_kv_transfer_are_refused(
    cluster: LocalCluster, servers: list[FakeVllm], given: dict[str, Any]
) -> None:
    num_before = len(received(servers))
    for path, body in ((EMBEDDINGS, {"input": "a"}), (CHATS, chat_with_image())):
        refused = post(cluster, path, body | given)
        assert (refused[0], error_of(refused).partition(" ")[0]) == (400, "kv_transfer_params")
    refused = post(
        cluster, "/v1/audio/transcriptions", form("", kv_transfer_params="{}"), content_type=FORM
    )
    assert refused[0] == 400
    assert len(received(servers)) == num_before


def test_what_concerns_other_tenants_is_not_the_clients_to_set(
    cluster: LocalCluster, servers: list[FakeVllm]
) -> None:
    given = {"cache_salt": "mine", "priority": 1, "request_id": "another"}
    for fields in ({}, given):
        assert post(cluster, EMBEDDINGS, {"input": "salted", **fields})[0] == 200
    own, changed = [each.json for each in received(servers) if b"salted" in each.body]
    assert own.keys() == changed.keys() == {"model", "input", "cache_salt"}
    assert changed["cache_salt"] not in (own["cache_salt"], "mine", hashed_salt(b"mine"))


def test_unknown_models_and_broken_bodies_are_refused(cluster: LocalCluster) -> None:
    unknown = post(cluster, EMBEDDINGS, {"model": "other", "input": "a"})
    assert (unknown[0], json.loads(unknown[2])["error"]["code"]) == (404, "model_not_found")
    assert post(cluster, EMBEDDINGS, b"[1]")[0] == 400
    assert post(cluster, EMBEDDINGS, b"{")[0] == 400
    assert post(cluster, EMBEDDINGS, {"input": "a"}, key="wrong")[0] == 401
    assert post(cluster, EMBEDDINGS, {"input": "a", "model": 5})[0] == 400


def test_a_tenants_limits_hold(cluster: LocalCluster) -> None:
    """The tokens are estimated before, and are those of the answer afterwards."""
    before = usage_of(cluster, "limited")["prompt_tokens"]
    assert post(cluster, EMBEDDINGS, {"input": "a" * 80}, LIMITED_KEY)[0] == 200
    assert usage_of(cluster, "limited")["prompt_tokens"] - before == 80
    refused = post(cluster, EMBEDDINGS, {"input": "a" * 200}, LIMITED_KEY)
    assert refused[0] == 429
    assert "retry-after" in refused[1]
    assert post(cluster, EMBEDDINGS, {"input": "a" * 8000}, LIMITED_KEY)[0] in (400, 429)


def test_a_failing_server_is_left_before_the_first_byte(
    cluster: LocalCluster, servers: list[FakeVllm]
) -> None:
    servers[0].failure_status = 500
    for number in range(4):
        status, _, answer = post(cluster, EMBEDDINGS, {"input": f"failing {number}"})
        assert status == 200, answer
    servers[1].failure_status = 503
    failed = post(cluster, EMBEDDINGS, {"input": "both"})
    assert (failed[0], "EngineDeadError" in error_of(failed)) == (503, True)


def test_a_client_that_leaves_cancels_at_the_server(
    cluster: LocalCluster, servers: list[FakeVllm], thread: FakeVllmThread
) -> None:
    for server in servers:
        thread.call(server.answers.clear)
    num_before, cancelled = len(received(servers)), sum(each.num_cancelled for each in servers)
    with closing(http.client.HTTPConnection(cluster.url.removeprefix("http://"))) as connection:
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        connection.request("POST", EMBEDDINGS, json.dumps({"input": "leaving"}), headers)
        thread.wait_until(lambda: len(received(servers)) > num_before)
    thread.wait_until(lambda: sum(each.num_cancelled for each in servers) > cancelled)


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_a_request_without_an_answer_goes_to_another_server(
    cluster: LocalCluster, servers: list[FakeVllm], thread: FakeVllmThread, fault: str
) -> None:
    wait_for_both(cluster, servers)
    for server in servers:
        thread.call(server.answers.clear)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, cluster, CHATS, chat_with_image(fault, stream=True))
        thread.wait_until(lambda: bool(servers_with(servers, fault)))
        [victim] = servers_with(servers, fault)
        port = victim.port
        if fault == "freeze":
            thread.call(victim.step.clear)
        else:
            thread.close(victim)
        for server in servers:
            thread.call(server.answers.set)
        status, _, answer = running.result(60)
    assert (status, answer.count(b"word")) == (200, CHAT_WORDS)
    if fault == "kill":
        servers[servers.index(victim)] = thread.start("hub/model", port, paths=KNOWN_PATHS)


def servers_with(servers: list[FakeVllm], text: str) -> list[FakeVllm]:
    """Return the servers that have received a request with this text."""
    return [each for each in servers if any(text.encode() in r.body for r in each.route_requests)]


def wait_for_both(cluster: LocalCluster, servers: list[FakeVllm]) -> None:
    """Send requests until both servers have got some."""
    for number in count():
        post(cluster, EMBEDDINGS, {"input": f"wait {id(servers)} {number}"})
        if len(servers_with(servers, f"wait {id(servers)}")) == len(servers):
            return


def test_a_stream_that_breaks_ends_with_an_error(
    cluster: LocalCluster, servers: list[FakeVllm]
) -> None:
    for server in servers:
        server.end_after = 3
    status, _, answer = post(cluster, CHATS, chat_with_image(stream=True))
    *events, error, nothing = answer.split(b"\n\n")
    assert (status, len(events), nothing) == (200, 3, b"")
    assert "broke off its answer" in json.loads(error.removeprefix(b"data: "))["error"]["message"]


def test_a_document_that_breaks_is_not_taken_for_whole(
    cluster: LocalCluster, servers: list[FakeVllm]
) -> None:
    for server in servers:
        server.end_after = 20
    with pytest.raises(http.client.IncompleteRead):
        post(cluster, EMBEDDINGS, {"input": "broken"})


def test_a_server_that_only_pools_serves_what_it_can(thread: FakeVllmThread) -> None:
    """It has no token to be asked for: small requests of its own kind show that it is alive."""
    pools = [thread.start("hub/model", paths=("/pooling", EMBEDDINGS)) for _ in range(2)]
    settings: dict[str, object] = {
        "attach": ",".join(f"mixed={server.url}" for server in pools),
        "admission": "off",
    }
    with local_cluster(prefill=0, decode=0, mixed=2, settings=settings) as cluster:
        assert model_of(cluster)["capabilities"] == ["/pooling", EMBEDDINGS]
        assert post(cluster, EMBEDDINGS, {"input": [5, 6]})[0] == 200
        for path, body in (
            ("/score", {"text_1": "a", "text_2": "b"}),
            (COMPLETIONS, {"prompt": "a"}),
            (CHATS, {"messages": [{"role": "user", "content": "a"}]}),
            (CHATS, chat_with_image()),
        ):
            refused = post(cluster, path, body)
            assert (refused[0], path == CHATS or EMBEDDINGS in error_of(refused)) == (400, True)
        thread.call(pools[0].step.clear)
        for number in range(4):
            status, _, answer = post(cluster, EMBEDDINGS, {"input": f"frozen {number}"})
            assert status == 200, answer
        thread.call(pools[0].step.set)


def test_of_a_pair_the_prefill_server_answers_alone(thread: FakeVllmThread) -> None:
    pair = [thread.start("hub/model", paths=KNOWN_PATHS, lends_kv=True) for _ in range(2)]
    settings: dict[str, object] = {
        "attach": f"prefill={pair[0].url},decode={pair[1].url}",
        "admission": "off",
    }
    with local_cluster(prefill=1, decode=1, settings=settings) as cluster:
        status, headers, _ = post(cluster, CHATS, chat_with_image("pair"))
        assert (status, headers["x-baton-decode"]) == (200, "prefill-0")
        assert [len(each.route_requests) for each in pair] == [1, 0]


def test_own_workers_name_what_would_be_right() -> None:
    with local_cluster(prefill=1, decode=1) as cluster:
        assert model_of(cluster)["capabilities"] == [
            CHATS,
            COMPLETIONS,
            "/v1/messages",
            "/v1/responses",
        ]
        refused = post(cluster, EMBEDDINGS, {"input": "a"})
        assert (refused[0], json.loads(refused[2])["error"]["code"]) == (
            400,
            "unsupported_endpoint",
        )
        assert "no server that offers it is attached" in error_of(refused)
        refused = post(cluster, CHATS, chat_with_image())
        assert (refused[0], "attached server" in error_of(refused)) == (400, True)
