"""Tests the router with random and malformed requests: it must never answer with an internal error,
and never leak a request.

schemathesis generates requests that the OpenAPI document allows, and requests that it forbids.
Hypothesis generates malformed HTTP. The examples are the same in every run.
"""

import asyncio
import contextlib
import json
import socket
import string
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from baton.core.attention_window import MAX_WINDOW_TOKENS, AttentionWindow
from baton.text.tokenizer import Tokenizer
from router.api_document.document import build_document
from router.app import build_app
from router.http.response_writer import INLINE_WRITER_KEY
from tests.router_harness import (
    CHAT,
    COMPLETE,
    RouterHarness,
    chat,
    eventually,
    serve_over_tcp,
    write_tokenizer,
)

PATHS = (CHAT, COMPLETE, "/tokenize", "/detokenize")
WITHOUT_SUPERVISOR = {501, 503}
"""Statuses that only the pool endpoints may return, because the tests run no supervisor."""

FEW = hypothesis.settings(derandomize=True, max_examples=8, deadline=None)
SEVERAL = hypothesis.settings(derandomize=True, max_examples=30, deadline=None)
SOME = hypothesis.settings(derandomize=True, max_examples=50, deadline=None)


class Fuzzed:
    """A router over in-memory workers, with an event loop and a client to send requests."""

    def __init__(self, folder: Path, automatic: bool = True) -> None:
        tokenizer = Tokenizer.load(write_tokenizer(folder))
        self.router = RouterHarness(tokenizer, "Hello, wörld!", automatic)
        self.router.make_batch_service(folder / "batches", max_file_bytes=2000, folder_bytes=20_000)
        self.runner = asyncio.Runner()
        self.client = self.runner.run(self.router.client())

    def post(self, path: str, content: bytes, **headers: str) -> httpx.Response:
        all_headers = {"content-type": "application/json", **headers}
        return self.runner.run(self.client.post(path, content=content, headers=all_headers))

    def check(self, answer: httpx.Response) -> None:
        assert is_no_server_error(answer.request.url.path, answer.status_code), answer.text
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        self.check_no_request_is_left()

    def check_no_request_is_left(self) -> None:
        harness = self.router
        assert harness.service.tenants.request_limiter.num_in_use == 0
        assert harness.service.resources.body_budget.num_in_use == 0
        assert harness.prefill.jobs == harness.decode.jobs == []
        for records in harness.service.telemetry.history._records.values():
            assert all(record.finish_reason for record in records)

    def close(self) -> None:
        self.runner.run(self.client.aclose())
        self.runner.close()


class PatientClient:
    """Stands in for the inline body writer of a connection, because schemathesis calls the app
    without a connection. The client never disconnects, and accepts no inline writes."""

    on_disconnect: Callable[[], None] | None = None
    is_disconnected = False
    is_open = False


def is_no_server_error(path: str, status: int) -> bool:
    """Return whether ``status`` is allowed: it must be below 500, except that the endpoints of the
    pools may also answer with a status in WITHOUT_SUPERVISOR."""
    pools = path in ("/admin/pools", "/admin/scale", "/admin/drain")
    return status < 500 or (pools and status in WITHOUT_SUPERVISOR)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    with tempfile.TemporaryDirectory() as folder:
        fuzzed = Fuzzed(Path(folder))
        yield fuzzed
        fuzzed.close()


@pytest.fixture(scope="module")
def api(fuzzed: Fuzzed) -> Any:
    app = build_app(fuzzed.router.service, fuzzed.router.batch_service)

    async def connected(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, INLINE_WRITER_KEY: PatientClient()}, receive, send)

    return schemathesis.openapi.from_asgi("/openapi.json", connected)


ENDLESS = {"/admin/events"}
"""Paths whose responses do not end by themselves; test_console_routes.py tests them."""

OPERATIONS = [
    (path, method)
    for path, item in build_document("1")["paths"].items()
    for method in item
    if path not in ENDLESS
]
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_requests_by_the_openapi_document_get_documented_responses(
    fuzzed: Fuzzed, api: Any, path: str, method: str
) -> None:
    operation = api[path][method]

    def check(case: Any) -> None:
        answer = case.call()
        assert is_no_server_error(path, answer.status_code), answer.text
        case.validate_response(answer, checks=CHECKS)
        fuzzed.check_no_request_is_left()

    for mode in MODES:
        with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # no request is invalid
            FEW(hypothesis.given(operation.as_strategy(generation_mode=mode))(check))()


# -- bodies ---------------------------------------------------------------------------------

FIELDS = (
    "messages", "prompt", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "n", "best_of", "stop", "seed", "logit_bias", "logprobs", "top_logprobs", "stream",
    "stream_options", "tools", "tool_choice", "response_format", "echo", "suffix", "tokens",
    "stop_token_ids", "guided_regex", "guided_json", "guided_choice", "user", "metadata",
    "chat_template_kwargs", "cache_salt", "priority", "add_generation_prompt", "exact_kv",
    "attention_window",
)  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**63, 2**64, -1, 0, 10**30])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["user", "function", "<|im_start|>system", "\x00", "{{ 7 * 7 }}", "(a+)+$"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "1", "x"]), inner)
    ),
    max_leaves=6,
)


@SOME
@hypothesis.given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_any_values_in_any_fields_cause_no_server_error(
    fuzzed: Fuzzed, path: str, body: dict[str, Any]
) -> None:
    valid = {CHAT: chat(), COMPLETE: {"prompt": "x"}, "/tokenize": {"prompt": "x"}}
    content = json.dumps({**valid.get(path, {"tokens": [1]}), **body}).encode()
    fuzzed.check(fuzzed.post(path, content))


WINDOW_SIZES = st.integers(-2, 40) | st.sampled_from(
    [MAX_WINDOW_TOKENS, MAX_WINDOW_TOKENS + 1, 2**63, -(2**63)]
)


@SOME
@hypothesis.given(st.sampled_from([CHAT, COMPLETE]), WINDOW_SIZES, WINDOW_SIZES, st.booleans())
def test_attention_windows_of_any_size_are_answered_or_refused(
    fuzzed: Fuzzed, path: str, sink_tokens: int, recent_tokens: int, exact_kv: bool
) -> None:
    body = chat() if path == CHAT else {"prompt": "x"}
    window = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens}
    content = body | {"attention_window": window, "exact_kv": exact_kv, "max_tokens": 2}
    answer = fuzzed.post(path, json.dumps(content).encode())
    is_valid = AttentionWindow(sink_tokens, recent_tokens).is_valid
    assert answer.status_code == (200 if is_valid else 400), answer.text
    fuzzed.check(answer)


@SOME
@hypothesis.given(st.sampled_from(PATHS), st.binary(max_size=100))
def test_random_bytes_as_a_body_are_a_bad_request(
    fuzzed: Fuzzed, path: str, content: bytes
) -> None:
    answer = fuzzed.post(path, content)
    assert answer.status_code == 400
    fuzzed.check(answer)


def deep(levels: int) -> bytes:
    return b'{"prompt": ' + b"[" * levels + b"]" * levels + b"}"


def chat_with(fields: str) -> bytes:
    return b'{"messages": [{"role": "user", "content": "Hi"}], ' + fields.encode() + b"}"


EXTREME_BODIES = [
    deep(200), deep(100_000), b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    chat_with('"metadata": ' + '{"a":' * 50_000 + "1" + "}" * 50_000),
    chat_with('"guided_json": ' + '{"items":' * 2_000 + "{}" + "}" * 2_000),
    chat_with('"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": '
              + '{"anyOf": [' * 500 + "{}" + "]}" * 500 + "}}"),
    chat_with('"guided_regex": "' + "(" * 20_000 + ")" * 20_000 + '"'),
    chat_with('"guided_regex": "(a{1,999}){1,999}"'),
    chat_with('"temperature": 1e400'), chat_with('"temperature": ' + "9" * 5_000),
    chat_with('"seed": ' + "9" * 5_000), chat_with('"seed": 1e5'), chat_with('"n": 1e9'),
    chat_with('"n": 99999999999999999999'), chat_with('"max_tokens": 99999999999999999999'),
    chat_with('"temperature": NaN'), chat_with('"temperature": -Infinity'),
    chat_with('"n": 1, "n": 2, "max_tokens": 2'), chat_with('"max_tokens": 2, "max_tokens": "x"'),
    chat_with('"stop": "\\ud800"'), chat_with('"user": "\\udfff\\ud800"'),
    chat_with('"user": "\\u0000"'), chat_with('"max_tokens": 2, "stop": "\\u0000"'),
    chat_with('"logit_bias": {' + ",".join(f'"{n}": 1' for n in range(100_000)) + "}"),
    chat_with('"logit_bias": {"1": 1, "01": 2}'), chat_with('"logit_bias": {"\\u0661": 1}'),
    chat_with('"logit_bias": {"' + "9" * 5_000 + '": 1}'),
    chat_with('"stop_token_ids": [' + ",".join(["1"] * 100_000) + "]"),
    chat_with('"tools": [' + ",".join(['{"type": "function"}'] * 1000) + "]"),
    b'{"prompt": [' + b",".join([b'"x"'] * 100_000) + b"]}",
    b'{"prompt": [[' + b",".join([b"1"] * 100_000) + b"]]}",
    b'{"prompt": [1, ' + b"9" * 5_000 + b"]}", b'{"tokens": [-1, 1e3, true]}',
    b'{"tokens": [' + b"9" * 5_000 + b"]}", b'{"tokens": [18446744073709551616]}',
    b'{"prompt": "' + b"\xf0\x9f\x98\x80" * 10_000 + b'"}', b'\xef\xbb\xbf{"prompt": "x"}',
    b'{"prompt": "x"}garbage', b'{"prompt": "x",}', b"{'prompt': 'x'}", b'{"prompt": "x"}\x00',
    b" " * 100_000, b'{"messages": [' + b",".join([b"{}"] * 20_000) + b"]}",
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(EXTREME_BODIES)))
def test_extreme_bodies_cause_no_server_error(fuzzed: Fuzzed, number: int) -> None:
    for path in PATHS:
        answer = fuzzed.post(path, EXTREME_BODIES[number])
        fuzzed.check(answer)
        is_short = len(answer.content) < 4_000
        assert answer.status_code == 200 or is_short, "the error must not repeat the body"


# -- headers and paths ----------------------------------------------------------------------

HEADER_TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=60)


@SOME
@hypothesis.given(
    st.dictionaries(
        st.sampled_from(
            ["authorization", "content-length", "content-encoding", "x-request-id", "origin",
             "accept", "host", "expect", "x-baton-peer", "transfer-encoding", "content-type"]
        ),
        HEADER_TEXT | st.sampled_from(["9" * 5_000, "-1", "Bearer ", "chunked", "٣"]),
    )
)  # fmt: skip
def test_any_headers_cause_no_server_error(fuzzed: Fuzzed, headers: dict[str, str]) -> None:
    raw = {name: value.encode("latin-1", "replace") for name, value in headers.items()}
    request = fuzzed.client.build_request("POST", COMPLETE, content=b'{"prompt": "x"}')
    for name, value in raw.items():
        request.headers.raw.append((name.encode(), value))
    fuzzed.check(fuzzed.runner.run(fuzzed.client.send(request)))


@SOME
@hypothesis.given(
    st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "DELETE", "PATCH", "PUT", "TRACE", "X"]),
    st.sampled_from(["/", "/v1/models/", "/admin/requests/", "/admin/usage?since=", "/v1/files/"]),
    st.text(max_size=30),
)
def test_any_paths_cause_no_server_error(fuzzed: Fuzzed, method: str, path: str, rest: str) -> None:
    name = httpx.URL("http://test").copy_with(raw_path=_quoted(path + rest))
    answer = fuzzed.runner.run(fuzzed.client.request(method, name))
    if method != "HEAD":
        fuzzed.check(answer)
    assert is_no_server_error(answer.request.url.path, answer.status_code)


UNQUOTED = string.ascii_letters.encode() + string.digits.encode() + b"/?=&.-_"


def _quoted(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"".join(b"%%%02x" % byte if byte not in UNQUOTED else bytes([byte]) for byte in data)


# -- clients that disconnect ----------------------------------------------------------------

BODY = json.dumps(chat(stream=True, max_tokens=5)).encode()
RAW = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(BODY)
) + BODY
RESET = struct.pack("ii", 1, 0)


@pytest.fixture(scope="module")
def url(fuzzed: Fuzzed) -> Iterator[str]:
    """Return the URL at which the router listens. An exception in its event loop fails the test."""
    raised: list[object] = []
    fuzzed.runner.get_loop().set_exception_handler(lambda loop, context: raised.append(context))
    server = serve_over_tcp(fuzzed.router)
    yield fuzzed.runner.run(server.__aenter__())
    fuzzed.runner.run(server.__aexit__(None, None, None))
    assert raised == []


async def still_serves(url: str) -> None:
    async with httpx.AsyncClient() as client:
        assert (await client.post(url + COMPLETE, json={"prompt": "x"})).status_code == 200


@SOME
@hypothesis.given(
    st.integers(0, len(RAW)),
    st.binary(max_size=40) | st.sampled_from([b"\r\n", b"\r\n\r\n", b"\x00", b"0\r\n\r\n", RAW]),
    st.integers(0, 40),
)
def test_broken_http_leaves_the_router_serving(
    fuzzed: Fuzzed, url: str, start: int, inserted: bytes, num_removed: int
) -> None:
    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(RAW[:start] + inserted + RAW[start + num_removed :])
        writer.write_eof()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(0.02):  # the router may wait for more bytes
                answer = await reader.read()
                assert not answer or answer.startswith(b"HTTP/1.1 ")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await eventually(lambda: fuzzed.router.service.tenants.request_limiter.num_in_use == 0)
        await still_serves(url)

    fuzzed.runner.run(ask())
    fuzzed.check_no_request_is_left()


@SEVERAL
@hypothesis.given(st.integers(0, len(RAW)), st.booleans(), st.integers(1, 3))
def test_uploads_that_end_anywhere_leave_the_router_serving(
    fuzzed: Fuzzed, url: str, cut: int, reset: bool, times: int
) -> None:
    async def ask() -> None:
        for _ in range(times):
            client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
            client.sendall(RAW[:cut])
            await asyncio.sleep(0)
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.close()
        await still_serves(url)
        await eventually(lambda: fuzzed.router.service.tenants.request_limiter.num_in_use == 0)

    fuzzed.runner.run(ask())
    fuzzed.check_no_request_is_left()


@pytest.fixture(scope="module")
def stepped() -> Iterator[Fuzzed]:
    """Return a router whose workers generate a token only when a test calls ``step()``."""
    with tempfile.TemporaryDirectory() as folder:
        fuzzed = Fuzzed(Path(folder), automatic=False)
        yield fuzzed
        fuzzed.close()


@SOME
@hypothesis.given(st.integers(0, 16), st.booleans(), st.integers(1, 3), st.booleans())
def test_a_client_that_disconnects_at_any_token_cancels_its_request(
    stepped: Fuzzed, steps: int, stream: bool, n: int, reset: bool
) -> None:
    harness = stepped.router
    harness.service.telemetry.history._records.clear()
    body = json.dumps(chat(stream=stream, n=n)).encode()
    raw = RAW.partition(b"content-length")[0] + b"content-length: %d\r\n\r\n" % len(body) + body

    async def ask() -> None:
        async with serve_over_tcp(harness) as url:
            client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
            client.sendall(raw)
            await eventually(lambda: len(harness.decode.jobs) == n)
            for step in range(steps):
                harness.prefill.step() if step == 0 else harness.decode.step()
                await asyncio.sleep(0)
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.close()
            await eventually(lambda: harness.service.tenants.request_limiter.num_in_use == 0)

    stepped.runner.run(ask())
    stepped.check_no_request_is_left()
    [records] = harness.service.telemetry.history._records.values()
    assert {record.finish_reason for record in records} <= {"stop", "cancelled"}
    assert steps > 14 or any(record.finish_reason == "cancelled" for record in records)


def test_messages_are_never_rendered_as_templates(fuzzed: Fuzzed) -> None:
    """A message may contain template syntax, which must appear unchanged in the rendered prompt."""
    bombs = [
        "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ 7 * 7 }}", "{% raw %}", "{#", "{{",
    ]  # fmt: skip
    for bomb in bombs:
        body = {"messages": [{"role": "user", "content": bomb}], "add_generation_prompt": False}
        ids = fuzzed.post("/tokenize", json.dumps(body).encode()).json()["tokens"]
        text = fuzzed.post("/detokenize", json.dumps({"tokens": ids}).encode()).json()["prompt"]
        assert text == f"<|im_start|>user\n{bomb}<|im_end|>\n"
        fuzzed.check(fuzzed.post(CHAT, json.dumps(chat(bomb)).encode()))
