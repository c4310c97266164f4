"""A server with the wire forms of ``vllm serve`` 0.32, failures included, and no model: the next
token is a function of all tokens before it."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from attached_worker.server import Seeds
from attached_worker.vllm_protocol import PROBE
from baton.core.server_api import CHATS, COMPLETIONS
from testkit.fakes.kv_events import FakeKvEvents
from testkit.fakes.vllm_kv import BLOCK_TOKENS, FakeKv, lender_of
from testkit.fakes.vllm_routes import RouteRequest, chat_events, route_answer

T = TypeVar("T")

MODEL = "served-model"
VOCABULARY = range(100, 1100)
VERSION = "0.32.0"


def next_token(token_ids: Sequence[int]) -> int:
    """Return a token that depends on all tokens before it and on their number."""
    state = len(token_ids)
    for token in token_ids:
        state = (state * 31 + token) % 1_000_003
    return VOCABULARY[state % len(VOCABULARY)]


def expected_answer(prompt: Sequence[int], num_tokens: int, seed: int | None = None) -> list[int]:
    """Return the tokens that one server generates; with a ``seed`` they are sampled."""
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(next_token([*known, *noise(seed)]))
    return known[len(prompt) :]


def noise(seed: int | None, index: int | None = None) -> list[int]:
    """Return what a token depends on besides those before it: with an ``index`` in its answer, a
    generator that begins anew with each request."""
    return [each for each in (seed, index) if each is not None and seed is not None]


class FakeVllm:
    """Listens on a port of its own after :meth:`start`. ``requests`` are the bodies of the requests
    for completions, probes left out. ``chunk`` is the number of tokens of a streamed event."""

    def __init__(self, weights: str = "/models/served", chunk: int = 1) -> None:
        self.weights = weights
        self.version = VERSION
        self.chunk = chunk
        self.requests: list[dict[str, Any]] = []
        self.num_running = 0
        self.num_cancelled = 0
        self.step = asyncio.Event()
        """Set: tokens are generated. Cleared: the engine is frozen, and ``/version`` still
        responds."""

        self.step.set()
        self.end_after: int | None = None
        """The number of tokens after which an answer ends as ``ending`` says."""

        self.ending = "close"
        """``close`` the connection, send an ``error`` event, or finish with ``abort``."""

        self.refusal = ""
        self.is_stopping = False
        """Whether it ends all new answers at once, with status 200, as after SIGTERM."""

        self.counts_cached_tokens = True
        self.has_prefix_caching = True
        self.has_statistics = True
        self.api_key = ""
        self.prompt_seconds = 0.0
        """How long a prompt takes whose KV is not read from another server."""

        self.token_seconds = 0.0
        """How long a step takes, in which each running answer gets a token."""

        self.seeds = Seeds.NATIVE
        """How its sampled answers go on alike on another server."""

        self.has_lark = True

        self.paths: tuple[str, ...] = (COMPLETIONS, CHATS)
        """The routes that it offers; without completions, it generates nothing."""

        self.route_requests: list[RouteRequest] = []
        """The requests to its routes other than completions, probes left out."""

        self.failure_status = 0
        """The status with which these routes fail."""

        self.answers = asyncio.Event()
        """Cleared: these routes don't answer, though the engine is not frozen."""

        self.answers.set()

        self.adapters: dict[str, str] = {}
        """The folder of each adapter that it has loaded, by name."""

        self.lends_kv = False
        """Whether it was started with a KV connector."""

        self.kv = FakeKv(self.step)

        self.events: FakeKvEvents | None = None
        """Its prefix cache; None if it has none, and ``cached_tokens`` is 3."""

        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Future[None], asyncio.StreamWriter] = {}
        self._is_closed = False

    async def start(self, port: int = 0) -> None:
        if self.events is not None:
            self.events.open()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", port)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def close(self) -> None:
        """Stop listening, and end all connections, as when the process dies."""
        if self._server is not None:
            self._server.close()
        self.kv.is_reachable = False
        self._is_closed = True
        for writer in self._connections.values():
            writer.transport.abort()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self.events is not None:
            await self.events.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection. One that was accepted while the server closed is dropped."""
        if self._is_closed:
            writer.transport.abort()
            return
        handler = asyncio.ensure_future(self._serve(reader, writer))
        self._connections[handler] = writer
        handler.add_done_callback(self._connections.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0] or 0)
            body = await reader.readexactly(length)
            await self._answer(head, body, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(
        self, head: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        path = head.split(" ")[1]
        if self.api_key and path.startswith("/v1/"):
            _write(writer, json.dumps({"error": "Unauthorized"}), status=401)
            return
        if path in self._documents():
            _write(writer, self._documents()[path])
            return
        if path not in self.paths:
            _write(writer, json.dumps({"detail": "Not Found"}), status=404)
            return
        if path != COMPLETIONS:
            route = RouteRequest(path, _headers(head), body)
            await self._until_left(self._relay(route, writer), reader)
            return
        request = json.loads(body)
        if not self.has_lark and "grammar" in request.get("structured_outputs", {}):
            _write(writer, json.dumps({"error": {"message": "no '&'"}}), status=500)
            return
        if self.refusal:
            _write(writer, json.dumps({"error": {"message": self.refusal}}), status=400)
            return
        is_probe = request.get("user") == PROBE
        if not is_probe:
            self.requests.append(request)
        await self._until_left(self._generate(request, writer, is_probe), reader)

    async def _until_left(
        self, work: Coroutine[Any, Any, None], reader: asyncio.StreamReader
    ) -> None:
        """Answer a request, unless its client leaves."""
        self.num_running += 1
        answering = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(reader.read())
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.num_cancelled += 1
        finally:
            answering.cancel()
            leaving.cancel()
            self.num_running -= 1

    async def _relay(self, request: RouteRequest, writer: asyncio.StreamWriter) -> None:
        """Answer a request to one of the other routes."""
        is_probe = PROBE.encode() in request.body
        if not is_probe:
            self.route_requests.append(request)
        if self.refusal and not is_probe:
            _write(writer, json.dumps({"error": {"message": self.refusal}}), status=400)
            return
        if self.failure_status and not is_probe:
            _write(writer, json.dumps({"error": "EngineDeadError"}), status=self.failure_status)
            return
        if not is_probe:
            await self.answers.wait()
        await self.step.wait()
        if request.path != CHATS or not request.json.get("stream"):
            data = json.dumps(route_answer(request))
            cut = None if is_probe else self.end_after
            _write(writer, data, end_after=cut)
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for number, event in enumerate(chat_events(request.json)):
            if self.end_after is not None and number >= self.end_after:
                self._end_early(writer)
                return
            _write_event(writer, event)
            await writer.drain()
            await self.step.wait()
        _write_end(writer)

    async def _generate(
        self, request: dict[str, Any], writer: asyncio.StreamWriter, is_probe: bool
    ) -> None:
        if self.is_stopping:
            choice = {"index": 0, "text": "", "token_ids": [], "finish_reason": "abort"}
            _write(writer, json.dumps({"choices": [choice]}))
            return
        count, choices, cached = request["max_tokens"], [], 3
        if self.events is not None:
            cached = await self.events.use(request["prompt"], request.get("cache_salt", ""))
        if request.get("stream"):
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        known = await self._known(request)
        for start in range(0, count, self.chunk):
            await self.step.wait()
            if self.token_seconds:
                now = asyncio.get_running_loop().time()
                await asyncio.sleep(self.token_seconds - now % self.token_seconds)
            if not is_probe and self.end_after is not None and start >= self.end_after:
                self._end_early(writer)
                return
            tokens = []
            for index in range(start, min(start + self.chunk, count)):
                extra = self._noise(request, index)
                extra += map(ord, self.adapters.get(request["model"], ""))
                known.append(next_token([*known, *extra]))
                tokens.append(known[-1])
            reason = "length" if start + self.chunk >= count else None
            choices.append(self._choice(request, tokens, reason))
            if request.get("stream"):
                _write_event(writer, {"choices": [choices[-1]]})
                await writer.drain()
        usage: dict[str, Any] = {
            "prompt_tokens": len(request["prompt"]), "completion_tokens": count,
            "total_tokens": len(request["prompt"]) + count,
        }  # fmt: skip
        if self.counts_cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if request.get("stream"):
            _write_event(writer, {"choices": [], "usage": usage})
            _write_end(writer)
            return
        whole = choices[-1] | {"token_ids": [t for each in choices for t in each["token_ids"]]}
        if request.get("prompt_logprobs") is not None:
            entries = [None, *(_scores(token) for token in request["prompt"][1:])]
            whole["prompt_logprobs"] = entries
        response: dict[str, Any] = {"choices": [whole], "usage": usage}
        if self.lends_kv and (request.get("kv_transfer_params") or {}).get("do_remote_decode"):
            response["kv_transfer_params"] = self.kv.lend(request["prompt"])
        _write(writer, json.dumps(response))

    def _noise(self, request: dict[str, Any], index: int) -> list[int]:
        if self.seeds is Seeds.PROCESSOR and "vllm_xargs" in request:
            return noise(request["vllm_xargs"]["baton_seed"])
        if "vllm_xargs" in request:  # such a token is random; only probes have them here
            return noise(len(request["prompt"]), index)
        return noise(request.get("seed"), None if self.seeds is Seeds.NATIVE else index)

    async def _known(self, request: dict[str, Any]) -> list[int]:
        """Return the tokens that the request's KV stands for, once its lender can be read."""
        lender = lender_of(request)
        await self.step.wait()
        if lender is not None:
            await lender.step.wait()
        elif self.prompt_seconds:
            await asyncio.sleep(self.prompt_seconds)
        return await self.kv.known(request)

    def _choice(
        self, request: dict[str, Any], tokens: list[int], reason: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "token_ids": tokens}
        if request.get("logprobs") is not None:
            names = [f"token_id:{token}" for token in tokens]
            choice["logprobs"] = {
                "tokens": names,
                "token_logprobs": [-0.5 for _ in names],
                "top_logprobs": [{name: -0.5, "token_id:7": -1.5} for name in names],
            }
        return choice | {"finish_reason": reason, "stop_reason": None}

    def _end_early(self, writer: asyncio.StreamWriter) -> None:
        if self.ending == "error":
            _write_event(writer, {"error": {"message": "EngineCore died", "code": 500}})
            _write_end(writer)
        elif self.ending == "abort":
            choice = {"index": 0, "text": "", "token_ids": [], "finish_reason": "abort"}
            _write_event(writer, {"choices": [choice]})
            _write_end(writer)

    def _documents(self) -> dict[str, str]:
        model = {"id": MODEL, "root": self.weights, "parent": None, "max_model_len": 4096}
        labels = f'block_size="{BLOCK_TOKENS}",cache_dtype="auto",num_gpu_blocks="200"'
        labels += f',enable_prefix_caching="{self.has_prefix_caching}"'
        transfers = "vllm:nixl_bytes_transferred_sum 0.0\n" if self.lends_kv else ""
        return {
            "/health": "",
            "/version": json.dumps({"version": self.version}),
            "/openapi.json": json.dumps({"paths": {path: {} for path in self.paths}}),
            "/kv_event_sources": json.dumps(self._event_sources()),
            "/v1/models": json.dumps({"data": [model, *self._adapter_models()]}),
            "/metrics": self.has_statistics * f"vllm:cache_config_info{{{labels}}} 1.0\n"
            f'vllm:num_requests_running{{engine="0"}} {self.num_running}.0\n'
            'vllm:num_requests_waiting{engine="0"} 0.0\n'
            'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
            f"{transfers}",
        }

    def _adapter_models(self) -> list[dict[str, Any]]:
        return [{"id": n, "root": f, "parent": MODEL} for n, f in self.adapters.items()]

    def _event_sources(self) -> dict[str, Any]:
        if self.events is None:
            return {}
        return {"0": {"endpoint": self.events.events, "replay_endpoint": self.events.replay}}


def _scores(token: int) -> dict[str, Any]:
    return {
        str(token): {"logprob": -2.0, "rank": 2, "decoded_token": ""},
        "7": {"logprob": -1.0, "rank": 1, "decoded_token": ""},
    }


def _write_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    data = f"data: {json.dumps(event)}\n\n".encode()
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _write_end(writer: asyncio.StreamWriter) -> None:
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def _write(
    writer: asyncio.StreamWriter, body: str, status: int = 200, end_after: int | None = None
) -> None:
    """Write a response, or only the first ``end_after`` bytes of its body."""
    head = f"HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body.encode())}\r\n\r\n"
    writer.write(head.encode() + body.encode()[:end_after])


def _headers(head: str) -> dict[str, str]:
    lines = [line.partition(": ") for line in head.split("\r\n")[1:] if line]
    return {name.lower(): value for name, _, value in lines}


class FakeVllmThread:
    """Runs fakes in a thread of their own, for tests that start a cluster."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._fakes: list[FakeVllm] = []

    def start(self, weights: str, port: int = 0, **fields: Any) -> FakeVllm:
        """Start a fake with these values of its fields."""

        async def started() -> FakeVllm:
            fake = FakeVllm(weights)
            for name, value in fields.items():
                setattr(fake, name, value)
            await fake.start(port)
            return fake

        fake = self._run(started())
        self._fakes.append(fake)
        return fake

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the fakes' event loop, and wait for its result."""
        return self._run(coroutine)

    def call(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.01)

        self._run(wait())

    def close(self, fake: FakeVllm) -> None:
        self._run(fake.close())

    def stop(self) -> None:
        for fake in self._fakes:
            self.close(fake)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


@contextmanager
def vllm_servers() -> Iterator[FakeVllmThread]:
    thread = FakeVllmThread()
    try:
        yield thread
    finally:
        thread.stop()
