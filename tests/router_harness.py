"""Runs a router's HTTP API over in-memory workers, for the tests of its routes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from baton.clock import SystemClock
from baton.core.ids import Incarnation, TokenId, WorkerId
from baton.core.member import Member
from baton.core.request import RequestSpec
from baton.core.states import Role, WorkerState
from baton.text.detokenizer import byte_level_alphabet
from baton.text.grammar.checker import GrammarChecker
from baton.text.tokenizer import Tokenizer
from router.app import build_app
from router.batches.batch_store import BatchStore
from router.batches.service import BatchService
from router.generation.adapter_directory import AdapterDirectory
from router.generation.cluster import Cluster
from router.generation.generation_context import FailoverConfig, GenerationContext
from router.http.connection_limits import ConnectionLimits
from router.http.server import HttpServer, open_listener
from router.responses.background_responses import BackgroundResponses
from router.responses.response_service import ResponseService
from router.responses.response_store import ResponseLimits, ResponseStore
from router.serving.context import RouterConfig, RouterContext, RouterIds
from router.serving.grammar_validator import GrammarValidator
from router.serving.resumption import Resumption
from router.serving.served_model import ServedModel
from router.tenants.authentication import Authenticator
from testkit.fakes.adapter_registry import MemoryAdapterRegistry
from testkit.fakes.response_leases import MemoryResponseLeases
from testkit.fakes.response_store import MemoryResponseStore
from testkit.fakes.workers import FakeWorker, MemoryPlacer, MemoryWorkerConnections
from tests.http_transport import HttpServerTransport

CONTEXT = 64
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = 257
VOCAB = 300  # larger than the tokenizer's vocabulary, as in real models


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer whose token ids 0 to 255 are the bytes; 256 and 257 are ChatML's special
    tokens."""
    characters = _byte_characters()
    made = tokenizers.Tokenizer(models.BPE({c: b for b, c in enumerate(characters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHATML, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _byte_characters() -> list[str]:
    by_byte = {byte: character for character, byte in byte_level_alphabet().items()}
    return [by_byte[byte] for byte in range(256)]


def model_saying(text: str) -> Callable[[Sequence[TokenId], RequestSpec], TokenId]:
    """Return a model that generates ``text`` byte by byte, and then EOS."""
    tokens = [*text.encode(), EOS]

    def answer(known: Sequence[TokenId], spec: RequestSpec) -> TokenId:
        position = len(known) - spec.num_prompt_tokens
        return TokenId(tokens[min(position, len(tokens) - 1)])

    return answer


class StaticMembers:
    database_id = "1"

    def __init__(self, members: list[Member]) -> None:
        self.list = members

    async def members(self) -> list[Member]:
        return self.list


def member(name: str, role: Role, **fields: Any) -> Member:
    return Member(
        WorkerId(name), role, f"{name}:1", Incarnation(1), WorkerState.READY,
        model_digest="ab", block_tokens=4, kv_dtype="f32", max_model_tokens=CONTEXT,
        **{"model": "demo", **fields},
    )  # fmt: skip


CHECKER = GrammarChecker()
"""Shared by all tests, since its helper processes take a while to start."""


class RouterHarness:
    """A router over one prefill and one decode worker, both in memory."""

    def __init__(self, tokenizer: Tokenizer, text: str, automatic: bool, **settings: Any) -> None:
        keys = settings.pop("api_keys", {})
        admin_key = settings.pop("admin_key", None)
        stores_responses = settings.pop("stores_responses", False)
        answer = settings.pop("next_token", None) or model_saying(text)
        self.prefill = FakeWorker("p0", answer, eos=EOS, automatic=automatic)
        self.decode = FakeWorker("d0", answer, eos=EOS, automatic=automatic)
        self.decode.details = {"transport": "shm", "kv_transfer_bytes": "10"}
        self.placer = MemoryPlacer([self.prefill], [self.decode])
        self.members = StaticMembers([member("p0", Role.PREFILL), member("d0", Role.DECODE)])
        self.batch_service: BatchService | None = None
        self.response_store: ResponseStore | None = settings.pop("response_store", None)
        kept_answers = settings.pop("kept_answers", None)
        clock = SystemClock()
        cluster = Cluster(self.members, clock)
        links = MemoryWorkerConnections(self.prefill, self.decode)
        config = FailoverConfig(max_worker_wait_seconds=0.05, retry_pause_seconds=0.001)
        of_model = ("tool_parser", "reasoning_parser", "sampling_defaults")
        workers = cluster.workers_of("demo", 4096)
        model = ServedModel.build(
            tokenizer,
            workers,
            GenerationContext(
                self.placer,
                links,
                clock,
                config,
                rank_variants=workers.rank_variants,
                expects_workers=workers.expects_workers,
            ),
            vocab_size=VOCAB,
            aliases=frozenset({"/models/demo"}),
            grammar_validator=GrammarValidator(CHECKER.check),
            **{name: settings.pop(name) for name in of_model if name in settings},
        )
        ids = iter(range(10**6))
        self.service = RouterContext.build(
            config=RouterConfig(**settings),
            cluster=cluster,
            models=[model],
            authenticator=Authenticator(keys, admin_key),
            clock=clock,
            ids=RouterIds(lambda: f"{next(ids):x}", lambda: 77),
            resumption=Resumption(kept_answers, clock) if kept_answers is not None else None,
        )
        self.adapter_registry = MemoryAdapterRegistry()
        self.service.models.adapters = AdapterDirectory(
            cluster, self.adapter_registry, clock, lambda model, path: bytes(16)
        )
        self.response_service: ResponseService | None = None
        if stores_responses:
            self.response_store = MemoryResponseStore(ResponseLimits(), clock)

    @property
    def model(self) -> ServedModel:
        return self.service.models.all[0]

    def _make_response_service(self, store: ResponseStore) -> ResponseService:
        clock, authenticator = self.service.clock, self.service.tenants.authenticator
        leases = MemoryResponseLeases(clock)
        background = BackgroundResponses(store, leases, lambda: authenticator.directory, clock)
        return ResponseService(store, leases, background, clock)

    def make_batch_service(self, folder: Path, **settings: Any) -> BatchService:
        bounds = {"max_file_bytes": 10_000, "folder_bytes": 100_000, "requests_per_worker": 2}
        self.batch_service = BatchService(
            self.service, BatchStore(folder), **{**bounds, **settings}
        )
        return self.batch_service

    async def client(self) -> httpx.AsyncClient:
        await self.service.cluster.refresh()
        if self.response_store is not None:
            self.response_service = self._make_response_service(self.response_store)
        app = build_app(self.service, self.batch_service, self.response_service)
        transport = HttpServerTransport(app)
        return httpx.AsyncClient(transport=transport, base_url="http://test")


@asynccontextmanager
async def open_harness(
    tokenizer: Tokenizer, text: str = "Hello, wörld!", automatic: bool = True, **settings: Any
) -> AsyncIterator[tuple[RouterHarness, httpx.AsyncClient]]:
    router = RouterHarness(tokenizer, text, automatic, **settings)
    async with await router.client() as client:
        yield router, client
    assert router.service.tenants.request_limiter.num_in_use == 0
    assert router.prefill.jobs == router.decode.jobs == []


FINGERPRINT = "fp_f5b4f999fe"
"""The ``system_fingerprint`` of these workers, as a constant, so that a change is noticed."""

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
RESPOND = "/v1/responses"
USER = [{"role": "user", "content": "Hi"}]


def chat(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **fields}


def events(response: httpx.Response) -> list[Any]:
    blocks = [block for block in response.text.split("\n\n") if not block.startswith(": ")]
    assert blocks[-1] == ""
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [
        block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks[:-1]
    ]


def wrong_error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


@asynccontextmanager
async def serve_over_tcp(
    router: RouterHarness,
    limits: ConnectionLimits | None = None,
    refusals: list[str] | None = None,
    port: int = 0,
) -> AsyncIterator[str]:
    refusals = [] if refusals is None else refusals
    await router.service.cluster.refresh()
    server = HttpServer(build_app(router.service), SystemClock(), limits, refusals.append)
    listener = open_listener("127.0.0.1", port)
    server.listen(listener)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield url
    finally:
        await server.close()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def step_until_done(router: RouterHarness, *tasks: "asyncio.Task[Any]") -> None:
    while not all(task.done() for task in tasks):
        router.prefill.step()
        router.decode.step()
        await asyncio.sleep(0)


async def post_raw(url: str, head: str, chunks: list[bytes], end: bytes = b"}}") -> bytes:
    """POST the header lines ``head`` and the body ``chunks`` to CHAT. Return the response up to
    ``end`` or, if ``end`` is empty, everything that is received until the connection is closed."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode())
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
        async with asyncio.timeout(60):
            return await (reader.readuntil(end) if end else reader.read())
    finally:
        writer.close()
