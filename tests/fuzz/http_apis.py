"""Fuzzes a router over in-memory workers with requests to the Responses API, the Messages API and
the routes that take no body.

No request may end in a server error or in an exception, even one that is only logged. Errors and
streamed events must have the form of the request's API. Neither requests nor memory may leak.
"""

import asyncio
import contextlib
import gc
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import psutil

from baton.clock import SystemClock
from baton.core.ids import TokenId
from baton.core.request import RequestSpec
from baton.text.tokenizer import Tokenizer
from router.responses.background_responses import BackgroundResponses
from router.responses.response_store import ResponseLimits
from router.serving.request_handler import RequestHandler
from testkit.fakes.response_store import MemoryResponseStore
from tests.fuzz.api_answers import (
    error_fault,
    message_stream_fault,
    parse_events,
    response_fault,
    response_stream_fault,
)
from tests.fuzz.api_bodies import MESSAGES, RESPOND
from tests.fuzz.api_requests import ApiRequest, RequestMaker
from tests.fuzz.result import HANG_SECONDS, FuzzResult, Recorder
from tests.fuzz.unhandled_errors import record_hidden_errors
from tests.router_harness import EOS, RouterHarness, write_tokenizer

NAME = "apis"
CLOCK = SystemClock()
CONTEXT = 1024
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{{ m.reasoning_content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}|{% endfor %}{% if add_generation_prompt %}>{% endif %}{# <tool_call> </think> #}"
)
"""A template with everything that requests may contain."""

CALL = b'<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
FAILING_ANSWER = b"Hello"
"""The answer during which the worker fails."""

ANSWERS = (
    FAILING_ANSWER, b"Hello, w\xc3\xb6rld!", b"", b"<think>Hm</think>Yes", b"<think>Hm, well",
    b"</think>", CALL, b"Well.\n" + CALL + b"\n" + CALL, b"<think>Hm</think>" + CALL,
    CALL + b"after", b"<think></think><tool_call>", b"<tool_call>f</tool_call>", b'{"x": 1}',
    b'<tool_call>{"name": "run", "arguments": {"input": "a\\n\\"b\\""}}</tool_call>',
    b'<tool_call>{"name": "f", "arguments": {"x": ', b"\xff\xc3\xf0\x9f", b"\xf0\x9f\x91\xa9",
    b'<tool_call>{"name": "g", "arguments": {"x": 1e999}}</tool_call>',
    b'<tool_call>{"name": "f", "arguments": "\\ud800"}</tool_call>',
    b'<tool_call>{"name": "\\udc00", "arguments": {}}</tool_call>',
)  # fmt: skip
"""The model's answers, chosen by the length of the prompt."""

LIMITS = ResponseLimits(tenant_bytes=2**20, tenant_responses=100)
MAX_KNOWN_IDS = 50
CASES_UNTIL_CHECK = 100
CASES_UNTIL_WARM = 500
MAX_IDLE_HANDLERS = 2
"""How many handlers may stay in memory: an idle connection keeps that of its last request."""

MAX_GROWTH_BYTES = 96 * 2**20


def fuzz(seconds: float, seed: int) -> FuzzResult:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        return runner.run(_Fuzz(Path(folder), seed).run(seconds))


class _Fuzz:
    def __init__(self, folder: Path, seed: int) -> None:
        self._known_ids: list[str] = []
        self._maker = RequestMaker(np.random.default_rng(seed), self._known_ids)
        self._recorder = Recorder(NAME, seed)
        write_tokenizer(folder)
        config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        self._router = router = RouterHarness(
            Tokenizer.load(folder),
            "",
            automatic=True,
            response_store=MemoryResponseStore(LIMITS, CLOCK),
            next_token=self._next_token,
            reasoning_parser="qwen3",
        )
        router.members.list = [
            replace(member, max_model_tokens=CONTEXT) for member in router.members.list
        ]
        self._warm_bytes = 0

    async def run(self, seconds: float) -> FuzzResult:
        until, number = CLOCK.monotonic() + seconds, 0
        with record_hidden_errors(self._recorder):
            async with await self._router.client() as client:
                background = asyncio.create_task(self._background.run())
                while CLOCK.monotonic() < until:
                    await self._case(client)
                    number += 1
                    if number % CASES_UNTIL_CHECK == 0:
                        await self._check_what_is_left()
                    if number == CASES_UNTIL_WARM:
                        self._warm_bytes = _memory_bytes()
                background.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await background
        self._check_memory()
        return self._recorder.result()

    async def _case(self, client: httpx.AsyncClient) -> None:
        request = self._maker.request()
        self._recorder.begin(f"{request.method} {request.path} {request.headers} {request.data!r}")
        answer = await self._ask(client, request)
        if answer is None:
            return
        try:
            fault = _fault(request, answer)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            fault = f"a response of an unexpected form ({error!r}): {answer.text[:500]}"
        if fault:
            self._recorder.crash(fault)
        elif request.path == RESPOND and answer.status_code == 200 and request.method == "POST":
            self._remember(answer)

    async def _ask(self, client: httpx.AsyncClient, request: ApiRequest) -> httpx.Response | None:
        try:
            async with asyncio.timeout(HANG_SECONDS):
                return await client.request(
                    request.method, request.path, content=request.data, headers=request.headers
                )
        except TimeoutError:
            self._recorder.hang("no answer")
        # Any exception that escapes from the router is a bug.
        except Exception as error:
            self._recorder.crash(repr(error))
        return None

    def _remember(self, answer: httpx.Response) -> None:
        """Remember the id of a response, so that later requests refer to the response."""
        is_stream = answer.headers["content-type"].startswith("text/event-stream")
        response = parse_events(answer.text)[0]["response"] if is_stream else answer.json()
        self._known_ids.append(response["id"])
        del self._known_ids[:-MAX_KNOWN_IDS]

    async def _check_what_is_left(self) -> None:
        """Wait for the background responses, then check that no request has left anything
        behind."""
        for worker in (self._router.prefill, self._router.decode):
            worker.submitted.clear()
            worker.cancelled.clear()
        self._router.placer.queries.clear()
        give_up_at = CLOCK.monotonic() + HANG_SECONDS
        while any(self._left().values()) and CLOCK.monotonic() < give_up_at:
            await asyncio.sleep(0.05)
        left = self._left()
        if any(left.values()):
            self._recorder.crash(f"these are left: {left}")

    def _left(self) -> dict[str, int]:
        """Return counts that must all be 0 while no request is served."""
        router = self._router
        resources = router.service.resources
        return {
            "requests": router.service.tenants.request_limiter.num_in_use,
            "background responses": self._background.num_running,
            "bytes": resources.body_budget.num_in_use,
            "offloaded calls": resources.offload_executor.num_waiting,
            "jobs": len(router.prefill.jobs) + len(router.decode.jobs),
            "handlers": max(_num_handlers() - MAX_IDLE_HANDLERS, 0),
        }

    def _check_memory(self) -> None:
        growth = _memory_bytes() - self._warm_bytes if self._warm_bytes else 0
        if growth > MAX_GROWTH_BYTES:
            self._recorder.crash(f"memory grew by {growth} bytes")

    @property
    def _background(self) -> BackgroundResponses:
        service = self._router.response_service
        assert service is not None, "RouterHarness.client() must be called first"
        return service.background

    def _next_token(self, known: Sequence[TokenId], spec: RequestSpec) -> TokenId:
        answer = ANSWERS[spec.num_prompt_tokens % len(ANSWERS)]
        position = len(known) - spec.num_prompt_tokens
        if answer is FAILING_ANSWER and position == len(answer) - 1:
            worker = self._router.decode
            asyncio.get_running_loop().call_soon(
                worker.fail_jobs, "INVALID_ARGUMENT", "made to fail"
            )
        return TokenId(answer[position] if position < len(answer) else EOS)


def _fault(request: ApiRequest, answer: httpx.Response) -> str:
    """Return what is wrong with a response; an empty string if nothing is."""
    status = answer.status_code
    if request.method == "HEAD" or status in (204, 307):
        return "a body" if answer.content else ""
    if status >= 500 or b'"internal error"' in answer.content:
        return f"{status} {answer.text[:500]}"
    if status >= 400:
        return error_fault(answer.content, is_anthropic=request.is_anthropic)
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = parse_events(answer.text)
        return (message_stream_fault if request.is_anthropic else response_stream_fault)(events)
    if answer.headers["content-type"] == "application/json":
        body = answer.json()
        if request.path == RESPOND and request.method == "POST":
            return response_fault(body)
        if request.path == MESSAGES:
            return "" if body["stop_reason"] else "a message without a stop reason"
    return ""


def _num_handlers() -> int:
    """Return the number of request handlers that are still in memory."""
    gc.collect()
    # isinstance() would read each object's __class__, which warns for some of torch's.
    return sum(issubclass(type(each), RequestHandler) for each in gc.get_objects())


def _memory_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
