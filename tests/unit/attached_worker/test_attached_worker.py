"""Tests a worker whose engine is a server of others, over a server with vLLM's wire forms."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from attached_worker.http_exchange import parse_address
from attached_worker.server import Seeds, ServerFacts
from attached_worker.vllm_protocol import encode_request
from attached_worker.vllm_server import VllmServer
from attached_worker.worker import IDLE_PROBE_SECONDS, SWEEP_SECONDS, AttachedWorker
from baton.clock import Clock, SystemClock
from baton.core.attention_window import AttentionWindow
from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import Epoch, RequestId, TokenId, WorkerId
from baton.core.request import FinishReason, RequestOutput, RequestSpec, SamplingParams
from baton.core.server_api import hashed_salt
from baton.core.states import Role, WorkerState
from baton.core.task import Task
from baton.errors import Invalid, Unavailable
from baton.rpc.worker_client import GrpcKvImportConnector
from baton.worker.output_stream import OutputStream
from testkit.fakes.vllm_server import MODEL, FakeVllm, expected_answer

PROMPT = tuple(map(TokenId, (5, 6, 7, 8)))
WHOLE = Task.PREFILL_AND_DECODE
FACTS = ServerFacts("vllm", "0.32.0", MODEL, "weights", 4096, 16, 200, "auto", seeds=Seeds.NATIVE)


def request(name: str = "r", max_tokens: int = 6, **fields: Any) -> RequestSpec:
    sampling = SamplingParams(max_tokens, temperature=0.0, **fields)
    return RequestSpec(RequestId(name), Epoch(0), PROMPT, len(PROMPT), sampling)


class ShiftedClock(SystemClock):
    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


@asynccontextmanager
async def attached(
    fake: FakeVllm,
    is_float32: bool = False,
    clock: Clock | None = None,
    has_other_ready_workers: Callable[[], bool] = lambda: True,
) -> AsyncIterator[AttachedWorker]:
    """Run a worker over ``fake`` that is ready."""
    await fake.start()
    server = VllmServer(parse_address(fake.url))
    worker = AttachedWorker(
        WorkerId("mixed-0"),
        Role.MIXED,
        server,
        await server.describe(),
        clock or SystemClock(),
        GrpcKvImportConnector(),
        has_other_ready_workers=has_other_ready_workers,
        is_float32=is_float32,
    )
    running = asyncio.ensure_future(worker.run())
    while worker.state is WorkerState.JOINING:
        await asyncio.sleep(0)
    try:
        yield worker
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await fake.close()


async def answer(stream: OutputStream, name: str = "r") -> list[RequestOutput]:
    """Return the outputs of a request, to its last."""
    outputs: list[RequestOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += [each for each in await stream.next_outputs() if each.request_id == name]
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("chunk", [1, 4, 6, 7])
async def test_answer_is_the_servers(chunk: int) -> None:
    async with attached(FakeVllm(chunk=chunk)) as worker:
        stream = worker.open_stream()
        stream.submit(request(), WHOLE, None)
        outputs = await answer(stream)
    assert tokens(outputs) == expected_answer(PROMPT, 6)
    assert [output.first_index for output in outputs] == list(range(0, 6, chunk))
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert outputs[-1].cached_tokens == 3


async def test_logprobs_are_the_servers() -> None:
    async with attached(FakeVllm()) as worker:
        stream = worker.open_stream()
        stream.submit(request(max_tokens=1, logprobs=2), WHOLE, None)
        (output,) = await answer(stream)
    (score,) = output.logprobs
    (token,) = expected_answer(PROMPT, 1)
    assert (score.token_id, score.logprob, score.top) == (token, -0.5, ((token, -0.5), (7, -1.5)))


async def test_prompt_logprobs_come_with_a_whole_answer() -> None:
    fake = FakeVllm()
    async with attached(fake) as worker:
        stream = worker.open_stream()
        stream.submit(request(max_tokens=2, prompt_logprobs=1), WHOLE, None)
        (output,) = await answer(stream)
    assert tokens([output]) == expected_answer(PROMPT, 2)
    assert [score.token_id for score in output.prompt_logprobs] == list(PROMPT[1:])
    assert {score.top for score in output.prompt_logprobs if score.token_id != 7} == {((7, -1.0),)}
    assert "stream" not in fake.requests[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": Grammar(GrammarKind.REGEX, "a+")},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
    ],
)
async def test_what_no_other_server_could_continue_is_held(fields: dict[str, Any]) -> None:
    fake = FakeVllm()
    fake.end_after = 4
    async with attached(fake) as worker:
        stream = worker.open_stream()
        stream.submit(request(**fields), WHOLE, None)
        (output,) = await answer(stream)
        assert (tokens([output]), output.first_index) == ([], 0)
        assert output.details["error_status"] == "UNAVAILABLE"
        fake.end_after = None
        stream.submit(request("again", **fields), WHOLE, None)
        assert tokens(await answer(stream, "again")) == expected_answer(PROMPT, 6)


async def test_cancelling_cancels_at_the_server() -> None:
    fake = FakeVllm()
    async with attached(fake) as worker:
        fake.step.clear()
        stream = worker.open_stream()
        stream.submit(request(), WHOLE, None)
        while not fake.requests:
            await asyncio.sleep(0)
        stream.cancel(RequestId("r"), Epoch(0))
        while not fake.num_cancelled:
            await asyncio.sleep(0)
        assert worker.is_idle
        fake.step.set()


@pytest.mark.parametrize("ending", ["close", "error", "abort"])
async def test_an_answer_that_breaks_off_is_continued_by_another_server(ending: str) -> None:
    first, second = FakeVllm(), FakeVllm()
    first.end_after, first.ending = 4, ending
    async with attached(first) as worker, attached(second) as other:
        stream = worker.open_stream()
        stream.submit(request(max_tokens=9), WHOLE, None)
        begun = await answer(stream)
        assert tokens(begun) == expected_answer(PROMPT, 9)[:4]
        assert begun[-1].finish_reason is FinishReason.ERROR
        assert begun[-1].first_index == 4
        assert begun[-1].details["error_status"] == "UNAVAILABLE"
        rest = replace(
            request(max_tokens=9), epoch=Epoch(1), token_ids=(*PROMPT, *map(TokenId, tokens(begun)))
        )
        stream = other.open_stream()
        stream.submit(rest, WHOLE, None)
        continued = await answer(stream)
    assert tokens(begun) + tokens(continued) == expected_answer(PROMPT, 9)
    assert continued[0].first_index == 4
    assert second.requests[0]["max_tokens"] == 5


@pytest.mark.parametrize(
    ("is_float32", "temperature", "by_position", "continuation"),
    [
        (True, 0.0, False, None),
        (False, 0.0, True, "numeric"),
        (True, 1.0, False, "numeric"),
        (True, 1.0, True, None),
        (False, 1.0, True, "numeric"),
    ],
)
async def test_answers_in_fp32_are_continued_exactly_where_seeds_allow_it(
    is_float32: bool, temperature: float, by_position: bool, continuation: str | None
) -> None:
    whole = replace(request(), sampling=SamplingParams(6, temperature=temperature))
    rest = replace(whole, request_id=RequestId("rest"), token_ids=(*PROMPT, TokenId(9)))
    fake = FakeVllm()
    fake.seeds = Seeds.NATIVE if by_position else Seeds.IGNORED
    async with attached(fake, is_float32) as worker:
        stream = worker.open_stream()
        stream.submit(whole, WHOLE, None)
        assert not any("continuation" in output.details for output in await answer(stream))
        stream.submit(rest, WHOLE, None)
        first, *others = await answer(stream, "rest")
    assert first.details.get("continuation") == continuation
    assert not any("continuation" in output.details for output in others)


@pytest.mark.parametrize("fault", ["refuses connections", "is shutting down"])
async def test_a_server_that_ends_an_answer_is_probed_at_once(fault: str) -> None:
    """Without the probe, the worker would accept requests that fail there, until it asks its quiet
    server again."""
    fake = FakeVllm()
    async with attached(fake) as worker:
        stream = worker.open_stream()
        if fault == "refuses connections":
            await fake.close()
        else:
            fake.is_stopping = True
        stream.submit(request(), WHOLE, None)
        (output,) = await answer(stream)
        assert output.details["error_status"] == "UNAVAILABLE"
        assert worker.state is WorkerState.READY
        while worker.state is not WorkerState.DRAINING:
            worker._record_progress()  # or its silence would have it probed
            await asyncio.sleep(0.01)


async def test_a_refused_request_fails_alone_with_the_servers_reason() -> None:
    fake = FakeVllm()
    async with attached(fake) as worker:
        fake.refusal = "logit_bias has a token outside of the vocabulary"
        stream = worker.open_stream()
        stream.submit(request(), WHOLE, None)
        (output,) = await answer(stream)
        assert output.details["error_status"] == "INVALID_ARGUMENT"
        assert fake.refusal in output.error
        assert worker.state is WorkerState.READY


async def test_requests_leave_a_frozen_server_which_serves_again_once_it_moves() -> None:
    fake = FakeVllm()
    async with attached(fake) as worker:
        stream = worker.open_stream()
        fake.step.clear()
        stream.submit(request(), WHOLE, None)
        (output,) = await answer(stream)
        assert output.details["error_status"] == "UNAVAILABLE"
        assert worker.state is WorkerState.DRAINING
        stream.submit(request("while it is frozen"), WHOLE, None)
        (output,) = await answer(stream, "while it is frozen")
        assert output.finish_reason is FinishReason.REROUTED
        fake.step.set()
        while worker.state is not WorkerState.READY:
            await asyncio.sleep(0.01)
        stream.submit(request("afterwards"), WHOLE, None)
        assert tokens(await answer(stream, "afterwards")) == expected_answer(PROMPT, 6)


async def test_a_frozen_server_is_waited_for_until_another_worker_is_ready() -> None:
    fake, clock, others = FakeVllm(), ShiftedClock(), set[str]()
    async with attached(fake, clock=clock, has_other_ready_workers=lambda: bool(others)) as worker:
        stream = worker.open_stream()
        fake.step.clear()
        stream.submit(request(), WHOLE, None)
        while fake.num_running < 2:  # the request, and a probe
            await asyncio.sleep(0.01)
        clock.ahead = 5.0
        await clock.sleep(2 * SWEEP_SECONDS)
        assert worker.state is WorkerState.READY
        others.add("mixed-1")
        (output,) = await answer(stream)
        assert "nothing for 1.0 s" in output.error
        assert worker.state is WorkerState.DRAINING


async def test_the_end_of_a_freeze_does_not_pass_for_a_servers_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next freeze is noticed as soon as the first."""
    monkeypatch.setattr("attached_worker.worker.LATE_SECONDS", 1.5)
    fake, clock = FakeVllm(), ShiftedClock()
    async with attached(fake, clock=clock) as worker:
        fake.step.clear()
        while "responded" not in (await worker.inspect()).description:  # a probe is given up
            await asyncio.sleep(0.01)
        while not fake.num_running:  # another
            await asyncio.sleep(0.01)
        clock.ahead = 10.0
        fake.step.set()
        while worker.state is not WorkerState.READY:
            await asyncio.sleep(0.01)
        fake.step.clear()
        while worker.state is WorkerState.READY:
            await asyncio.sleep(0.01)
        assert "nothing for 1.0 s" in (await worker.inspect()).description


async def test_a_server_that_moves_again_does_not_end_an_administrators_drain() -> None:
    fake = FakeVllm()
    async with attached(fake) as worker:
        stream = worker.open_stream()
        fake.step.clear()
        stream.submit(request(), WHOLE, None)
        await answer(stream)
        worker.start_drain(permanent=False)
        fake.step.set()
        while "lost" in (await worker.inspect()).description:
            await asyncio.sleep(0.01)
        assert worker.state is WorkerState.DRAINING


async def test_another_server_at_the_same_address_ends_the_worker() -> None:
    fake = FakeVllm()
    await fake.start()
    port, server = fake.port, VllmServer(parse_address(fake.url))
    worker = AttachedWorker(
        WorkerId("mixed-0"),
        Role.MIXED,
        server,
        await server.describe(),
        SystemClock(),
        GrpcKvImportConnector(),
    )
    running = asyncio.ensure_future(worker.run())
    while worker.state is WorkerState.JOINING:
        await asyncio.sleep(0)
    await fake.close()
    while worker.state is not WorkerState.DRAINING:
        await asyncio.sleep(0.01)
    newer = FakeVllm()
    newer.version = "0.33.0"
    await newer.start(port)
    with pytest.raises(ExceptionGroup) as raised:
        await running
    await newer.close()
    assert "0.33.0" in str(raised.value.exceptions[0])
    assert isinstance(raised.value.exceptions[0], Unavailable)


async def test_a_worker_that_was_stopped_asks_whether_its_server_is_the_same() -> None:
    """The server may have been restarted meanwhile, so that no probe has failed."""

    fake, clock = FakeVllm(), ShiftedClock()
    await fake.start()
    server = VllmServer(parse_address(fake.url))
    facts, connector = await server.describe(), GrpcKvImportConnector()
    worker = AttachedWorker(WorkerId("mixed-0"), Role.MIXED, server, facts, clock, connector)
    running = asyncio.ensure_future(worker.run())
    while worker.state is WorkerState.JOINING:
        await asyncio.sleep(0)
    fake.version, clock.ahead = "0.33.0", IDLE_PROBE_SECONDS + 1
    with pytest.raises(ExceptionGroup) as raised:
        await running
    await fake.close()
    assert "0.33.0" in str(raised.value.exceptions[0])


async def test_a_server_without_statistics_is_refused_by_the_flag() -> None:
    fake = FakeVllm()
    documents = fake._documents() | {"/metrics": ""}
    fake._documents = lambda: documents  # type: ignore[method-assign]
    await fake.start()
    with pytest.raises(Invalid, match="--disable-log-stats"):
        await VllmServer(parse_address(fake.url)).describe()
    await fake.close()


async def test_load_counts_what_waits_and_what_the_server_holds() -> None:
    fake = FakeVllm()
    async with attached(fake) as worker:
        fake.step.clear()
        stream = worker.open_stream()
        stream.submit(request(), WHOLE, None)
        load = worker.load
        assert (load.waiting, load.running, load.queued_tokens) == (1, 0, 4)
        assert (load.num_blocks, load.decode_requests, load.context_tokens) == (200, 1, 4)
        stream.close()
        fake.step.set()


def test_body_of_a_request() -> None:
    spec = RequestSpec(
        RequestId("r"),
        Epoch(1),
        (*PROMPT, TokenId(9)),
        len(PROMPT),
        SamplingParams(
            10, temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.5, seed=3,
            logit_bias=((TokenId(2), -1.5),), logprobs=0, stop_token_ids=(TokenId(1),),
            ignore_eos=True, min_tokens=4,
        ),
        tenant_salt=b"secret",
    )  # fmt: skip

    assert json.loads(encode_request(spec, FACTS)) == {
        "model": MODEL, "prompt": [5, 6, 7, 8, 9], "max_tokens": 9, "min_tokens": 3,
        "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": [1],
        "ignore_eos": True, "skip_special_tokens": False, "return_token_ids": True,
        "seed": 3, "logit_bias": {"2": -1.5}, "logprobs": 0,
        "return_tokens_as_token_ids": True, "cache_salt": hashed_salt(b"secret"),
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seeds", "fields"),
    [
        (Seeds.NATIVE, {"seed": 2**63 - 1}),
        (Seeds.PROCESSOR, {"vllm_xargs": {"baton_seed": 2**63 - 1}}),
        (Seeds.IGNORED, {}),
    ],
)
def test_seeds_fit_the_server(seeds: Seeds, fields: dict[str, Any]) -> None:
    spec = replace(request(), sampling=SamplingParams(10, temperature=0.5, seed=2**64 - 1))
    body = json.loads(encode_request(spec, replace(FACTS, seeds=seeds)))
    assert {name: body[name] for name in body if name in ("seed", "vllm_xargs")} == fields


def test_salts_reach_the_server_hashed() -> None:
    assert b"secret".hex() not in hashed_salt(b"secret")
    assert hashed_salt(b"secret") != hashed_salt(b"other")


def test_what_the_server_can_not_do_is_refused() -> None:
    with pytest.raises(Invalid, match="attention_window"):
        encode_request(replace(request(), attention_window=AttentionWindow(4, 16)), FACTS)
    rules = Grammar(GrammarKind.TOKEN_RULES, "{}")
    with pytest.raises(Invalid, match="bad_words"):
        encode_request(request(grammar=rules), FACTS)
    lark = Grammar(GrammarKind.LARK, "start: /a/")
    with pytest.raises(Invalid, match='"backend":"guidance"'):
        encode_request(request(grammar=lark), replace(FACTS, has_lark=False))


@pytest.mark.parametrize("url", ["https://host:1", "http://host", "host:1", "http://host:x"])
def test_wrong_urls(url: str) -> None:
    with pytest.raises(Invalid):
        parse_address(url)


def test_the_worker_needs_no_torch() -> None:
    code = "import sys, attached_worker.program; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
