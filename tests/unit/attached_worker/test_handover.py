"""Tests the hand-over between two attached servers, and what must not come of it when one of them,
or its worker, stops for a while: tokens from KV that was no longer the prompt's."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from attached_worker import handover
from attached_worker.handover import HANDOVER_SECONDS
from attached_worker.http_exchange import parse_address
from attached_worker.program import check_role, variant_of
from attached_worker.server import Seeds
from attached_worker.vllm_server import VllmServer
from attached_worker.worker import AttachedWorker
from baton.clock import SystemClock
from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import Epoch, Incarnation, RequestId, TokenId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import FinishReason, RequestOutput, RequestSpec, SamplingParams
from baton.core.states import Role, WorkerState
from baton.core.task import Task
from baton.errors import Invalid
from baton.rpc.server import build_server, listen
from baton.rpc.worker_client import GrpcKvImportConnector
from baton.rpc.worker_service import add_worker_service
from baton.worker.output_stream import OutputStream
from testkit.fakes.vllm_server import FakeVllm, expected_answer

GENERATION = Incarnation(7)


class ShiftedClock(SystemClock):
    """A clock that tests advance, as a process sees it that was stopped for a while."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


@dataclass
class Side:
    """A server, its worker, and a router's stream to that."""

    fake: FakeVllm
    clock: ShiftedClock
    worker: AttachedWorker
    source: WorkerRef
    stream: OutputStream

    async def sent(self) -> list[RequestOutput]:
        """Return what the worker has sent so far."""
        self.stream.announce_progress()
        return list(await self.stream.next_outputs())

    async def answer(self) -> list[RequestOutput]:
        """Return the outputs up to the last."""
        outputs: list[RequestOutput] = []
        while not outputs or outputs[-1].finish_reason is None:
            outputs += await self.stream.next_outputs()
        return outputs


@asynccontextmanager
async def side(
    role: Role, version: str = "0.32.0", seeds: Seeds = Seeds.NATIVE
) -> AsyncIterator[Side]:
    fake, clock, connector = FakeVllm(), ShiftedClock(), GrpcKvImportConnector()
    fake.lends_kv, fake.version, fake.seeds = True, version, seeds
    await fake.start()
    server = VllmServer(parse_address(fake.url))
    facts, name = await server.describe(), WorkerId(f"{role.value}-0")
    worker = AttachedWorker(
        name, role, server, facts, clock, connector, GENERATION, variant_of(facts, "ab"),
        has_other_ready_workers=lambda: True,
    )  # fmt: skip
    grpc_server = build_server()
    add_worker_service(grpc_server, worker)
    port = await listen(grpc_server, "127.0.0.1", 0)
    running = asyncio.ensure_future(worker.run())
    while worker.state is WorkerState.JOINING:
        await asyncio.sleep(0)
    try:
        source = WorkerRef(name, f"127.0.0.1:{port}", GENERATION)
        yield Side(fake, clock, worker, source, worker.open_stream())
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await connector.close()
        await grpc_server.stop(None)
        await fake.close()


@asynccontextmanager
async def pair(seeds: Seeds = Seeds.NATIVE) -> AsyncIterator[tuple[Side, Side]]:
    async with AsyncExitStack() as stack:
        sides = [side(role, seeds=seeds) for role in (Role.PREFILL, Role.DECODE)]
        prefill, decode = [await stack.enter_async_context(each) for each in sides]
        yield prefill, decode


def request(length: int = 20, max_tokens: int = 6, **fields: Any) -> RequestSpec:
    prompt = tuple(map(TokenId, range(5, 5 + length)))
    sampling = SamplingParams(max_tokens, **{"temperature": 0.0, **fields})
    return RequestSpec(RequestId("r"), Epoch(0), prompt, length, sampling)


def hand_over(spec: RequestSpec, prefill: Side, decode: Side) -> None:
    prefill.stream.submit(spec, Task.PREFILL, None)
    decode.stream.submit(spec, Task.DECODE, prefill.source)


async def next_outputs(side: Side) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = list(await side.stream.next_outputs())
    return outputs


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("length", [4, 15, 16, 17, 32, 33])
async def test_the_first_token_is_shown_at_once_and_the_other_server_goes_on(length: int) -> None:
    spec = request(length)
    async with pair() as (prefill, decode):
        decode.fake.step.clear()
        hand_over(spec, prefill, decode)
        (first,) = await next_outputs(prefill)
        decode.fake.step.set()
        rest = await decode.answer()
        await until(lambda: prefill.worker.is_idle and decode.worker.is_idle)
    assert (first.first_index, first.cached_tokens, first.finish_reason) == (0, 3, None)
    assert [output.first_index for output in rest] == [1, 2, 3, 4, 5]
    assert tokens([first]) + tokens(rest) == expected_answer(spec.token_ids, 6)
    assert rest[-1].finish_reason is FinishReason.LENGTH
    assert len(decode.fake.requests[0]["prompt"]) == length + 1
    assert prefill.fake.kv.lent == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0, "seed": 3},
        {"grammar": Grammar(GrammarKind.REGEX, "a+")},
        {"presence_penalty": 0.5},
    ],
)
async def test_what_begins_anew_with_a_request_is_generated_by_one_server(
    fields: dict[str, Any],
) -> None:
    spec = request(**fields)
    async with pair(Seeds.IGNORED) as (prefill, decode):
        hand_over(spec, prefill, decode)
        outputs = await decode.answer()
        await until(lambda: prefill.worker.is_idle)
        assert await prefill.sent() == []
    assert tokens(outputs) == expected_answer(spec.token_ids, 6)
    assert (outputs[0].first_index, outputs[-1].cached_tokens) == (0, 3)
    assert "seed" not in prefill.fake.requests[0]
    assert decode.fake.requests[0]["prompt"] == list(spec.token_ids)


async def test_sampled_answers_go_on_where_servers_sample_by_position() -> None:
    spec = request(temperature=1.0, seed=3)
    async with pair() as (prefill, decode):
        hand_over(spec, prefill, decode)
        (first,) = await next_outputs(prefill)
        rest = await decode.answer()
    assert tokens([first]) + tokens(rest) == expected_answer(spec.token_ids, 6, 3)
    assert [each["seed"] for each in (*prefill.fake.requests, *decode.fake.requests)] == [3, 3]


async def test_servers_that_sample_differently_share_no_answer() -> None:
    async with side(Role.PREFILL) as prefill, side(Role.DECODE, seeds=Seeds.PROCESSOR) as decode:
        hand_over(request(), prefill, decode)
        (output,) = await decode.answer()
    assert output.details["error_status"] == "INVALID_ARGUMENT"


async def test_an_answer_of_one_token_needs_no_other_server() -> None:
    spec = request(max_tokens=1)
    async with pair() as (prefill, decode):
        hand_over(spec, prefill, decode)
        (output,) = await prefill.answer()
        await until(lambda: decode.worker.is_idle)
        assert await decode.sent() == []
    assert tokens([output]) == expected_answer(spec.token_ids, 1)
    assert decode.fake.requests == []


async def read_late(prefill: Side, decode: Side, spec: RequestSpec) -> list[RequestOutput]:
    """Hand ``spec`` over to a frozen server, which reads the KV once others have written there."""
    decode.fake.step.clear()
    hand_over(spec, prefill, decode)
    await until(lambda: prefill.fake.kv.lent and decode.fake.requests)
    prefill.fake.kv.reuse()
    prefill.clock.ahead = HANDOVER_SECONDS + 1
    decode.fake.step.set()
    return await decode.answer()


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3}, {"presence_penalty": 1.0}])
async def test_kv_that_was_read_late_is_computed_again(fields: dict[str, Any]) -> None:
    spec = request(**fields)
    num_shown = 0 if "presence_penalty" in fields else 1
    async with pair() as (prefill, decode):
        outputs = await read_late(prefill, decode, spec)
        await until(lambda: prefill.worker.is_idle and decode.worker.is_idle)
    expected = expected_answer(spec.token_ids, 6, fields.get("seed"))
    assert tokens(outputs) == expected[num_shown:]
    assert outputs[0].first_index == num_shown
    late, again = decode.fake.requests
    assert "kv_transfer_params" in late and "kv_transfer_params" not in again


async def test_the_bound_is_what_keeps_wrong_tokens_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "HANDOVER_SECONDS", math.inf)
    spec = request()
    async with pair() as (prefill, decode):
        decode.fake.step.clear()
        hand_over(spec, prefill, decode)
        await until(lambda: prefill.fake.kv.lent and decode.fake.requests)
        prefill.fake.kv.reuse()
        decode.fake.step.set()
        assert tokens(await decode.answer()) != expected_answer(spec.token_ids, 6)[1:]


async def next_client_is_right(prefill: Side, decode: Side) -> bool:
    """Whether the decode server answers right when somebody sends it the prompt, and the token
    behind it, of a request whose KV it has read late."""
    spec = request()
    await read_late(prefill, decode, spec)
    (first,) = expected_answer(spec.token_ids, 1)
    tokens_again = (*spec.token_ids, TokenId(first))
    again = replace(spec, epoch=Epoch(1), token_ids=tokens_again, num_prompt_tokens=21)
    decode.stream.submit(again, Task.PREFILL_AND_DECODE, None)
    return tokens(await decode.answer()) == expected_answer(tokens_again, 6)


async def test_kv_that_was_read_late_serves_nobody_else() -> None:
    async with pair() as (prefill, decode):
        assert await next_client_is_right(prefill, decode)


async def test_the_salt_is_what_keeps_wrong_kv_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "None")  # as requests without one
    async with pair() as (prefill, decode):
        assert not await next_client_is_right(prefill, decode)


async def test_a_prefill_worker_that_was_stopped_does_not_take_old_kv_for_new() -> None:
    """The worker sees the server's response when it goes on, which may be long after it came."""
    spec = request()
    async with pair() as (prefill, decode):
        prefill.fake.step.clear()
        hand_over(spec, prefill, decode)
        await until(lambda: prefill.fake.requests)
        prefill.clock.ahead = HANDOVER_SECONDS + 1
        prefill.fake.step.set()
        outputs = await decode.answer()
    assert tokens(outputs) == expected_answer(spec.token_ids, 6)[1:]
    assert "kv_transfer_params" not in decode.fake.requests[-1]


@pytest.mark.parametrize("fault", ["freeze", "kill"])
async def test_a_prefill_server_that_is_lost_before_the_read(fault: str) -> None:
    async with pair() as (prefill, decode):
        decode.fake.step.clear()
        hand_over(request(), prefill, decode)
        await until(lambda: decode.fake.requests)
        if fault == "freeze":
            prefill.fake.step.clear()
            decode.fake.step.set()
        else:
            await prefill.fake.close()
        (output,) = await decode.answer()
        assert output.details["error_status"] == "UNAVAILABLE"
        await until(lambda: prefill.worker.is_idle and decode.worker.is_idle)


async def test_a_prefill_server_that_shuts_down_has_the_request_placed_elsewhere() -> None:
    async with pair() as (prefill, decode):
        prefill.fake.is_stopping = True
        hand_over(request(), prefill, decode)
        (output,) = await prefill.answer()
    assert output.details["error_status"] == "UNAVAILABLE"
    assert "abort" in output.error


async def test_cancelling_frees_both_sides() -> None:
    async with pair() as (prefill, decode):
        decode.fake.step.clear()
        hand_over(request(), prefill, decode)
        await until(lambda: decode.fake.requests)
        decode.stream.cancel(RequestId("r"), Epoch(0))
        await until(lambda: prefill.worker.is_idle and decode.worker.is_idle)
        await until(lambda: decode.fake.num_cancelled)
        decode.fake.step.set()


async def test_servers_of_two_versions_exchange_no_kv() -> None:
    async with side(Role.PREFILL) as prefill, side(Role.DECODE, "0.31.0") as decode:
        hand_over(request(), prefill, decode)
        (output,) = await decode.answer()
    assert output.details["error_status"] == "INVALID_ARGUMENT"
    assert "vllm 0.32.0" in output.error and "vllm 0.31.0" in output.error


async def test_a_server_without_a_connector_is_refused_by_the_flag() -> None:
    fake = FakeVllm()
    await fake.start()
    facts = await VllmServer(parse_address(fake.url)).describe()
    await fake.close()
    check_role(facts, Role.MIXED)
    with pytest.raises(Invalid, match="--kv-transfer-config"):
        check_role(facts, Role.DECODE)
