"""Tests KV transfers between two workers: some complete, some are cancelled at a random moment,
some arrive corrupted, and some lose their connection."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import BlockKey, Epoch, Incarnation, TokenId, WorkerId
from baton.core.kv_transfer import (
    CHECKSUM_XXH3,
    BlockRef,
    Endpoint,
    KvTransferChunk,
    KvTransferDone,
    KvTransferEvent,
    KvTransferOpen,
    KvTransferScheduled,
    WorkerRef,
)
from baton.core.request import FinishReason
from baton.core.task import Task
from baton.errors import Invalid, NotFound
from baton.rpc.worker_client import KvImportConnector
from baton.transport.base import TransferRange
from baton.worker.context import WorkerConfig
from testkit.fakes.runner import reference_answer
from tests.byte_grammars import (
    EOS,
    byte_grammars,
    choice,
    generate_all,
    grammar_request,
    regex,
    schema,
)
from tests.sim.worker_cluster import (
    Cluster,
    cluster,
    collect,
    is_finished,
    request,
    tokens_of,
)

SEED = 7


async def run_disaggregated(running: Cluster, spec, cancel_after: int | None = None):  # type: ignore[no-untyped-def]
    """Prefill one request on the prefill worker, decode it on the decode worker, and return its
    outputs. Cancel it after ``cancel_after`` outputs of the decode worker, unless that is None."""
    prefill, decode = running.prefill.worker.open_stream(), running.decode.worker.open_stream()
    prefill.submit(spec, Task.PREFILL, None)
    decode.submit(spec, Task.DECODE, running.prefill.ref)
    first = await collect(prefill, bool)
    if first[0].finish_reason or spec.sampling.max_tokens == 1:
        prefill.close()
        decode.close()
        return first
    if cancel_after is not None:
        rest = await collect(decode, lambda outputs: len(outputs) >= cancel_after)
        decode.cancel(spec.request_id, spec.epoch)
        prefill.cancel(spec.request_id, spec.epoch)
    else:
        rest = await collect(decode, is_finished)
    prefill.close()
    decode.close()
    return first + rest


@pytest.mark.parametrize("seed", range(6))
async def test_an_answer_follows_its_grammar_across_a_kv_transfer(seed: int) -> None:
    """The first token, which the prefill worker generates, must follow the grammar, too."""
    grammars = byte_grammars()
    for grammar in (choice("yes", "yesterday", "no"), regex("[0-9]{3,6}:x*"), schema({"const": 5})):
        spec = grammar_request("r", grammar, seed, max_tokens=40)
        text, reason = generate_all(grammars, [spec])["r"]
        async with cluster(constraints=grammars, eos=frozenset({EOS})) as running:
            outputs = await run_disaggregated(running, spec)
            await running.decode.wait_until_free()
        assert bytes(t for t in tokens_of(outputs) if t != EOS) == text
        assert outputs[-1].finish_reason is reason


async def test_an_invalid_grammar_fails_only_its_own_request() -> None:
    grammars = byte_grammars()
    refused = [Grammar(GrammarKind.REGEX, "("), schema({"$ref": "#"})]
    async with cluster(constraints=grammars, eos=frozenset({EOS})) as running:
        for number, grammar in enumerate(refused):
            stream = running.prefill.worker.open_stream()
            stream.submit(grammar_request(str(number), grammar, 1), Task.PREFILL, None)
            (output,) = await collect(stream, bool)
            assert output.finish_reason is FinishReason.ERROR
            assert output.details["error_status"] == "INVALID_ARGUMENT"
            stream.close()
        good = await run_disaggregated(running, grammar_request("good", choice("yes"), 1))
        await running.prefill.wait_until_free()
    assert tokens_of(good) == (*b"yes", EOS)


async def test_a_worker_without_grammar_support_refuses_grammars() -> None:
    async with cluster() as running:
        stream = running.prefill.worker.open_stream()
        stream.submit(grammar_request("r", choice("yes"), 1), Task.PREFILL_AND_DECODE, None)
        (output,) = await collect(stream, bool)
        stream.close()
    assert output.finish_reason is FinishReason.ERROR
    assert output.error == (
        "this worker does not support answers constrained by a grammar (response_format)"
    )


async def test_prompt_logprobs_are_the_same_after_a_kv_transfer_and_with_a_cached_prefix() -> None:
    prompt = list(range(1, 42))
    async with cluster() as running:
        await run_disaggregated(running, request("warm", prompt, 3))
        outputs = await run_disaggregated(running, request("r", prompt, 3, prompt_logprobs=0))
        again = await run_disaggregated(running, request("s", prompt, 3, prompt_logprobs=0))
        await running.decode.wait_until_free()
    assert [score.token_id for score in outputs[0].prompt_logprobs] == prompt[1:]
    assert outputs[0].cached_tokens == 0
    assert not any(output.prompt_logprobs for output in outputs[1:])
    assert again[0].prompt_logprobs == outputs[0].prompt_logprobs


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 40, 100])
async def test_a_disaggregated_request_has_the_output_of_a_local_one(length: int) -> None:
    spec = request("r", list(range(1, length + 1)), 20)
    async with cluster() as running:
        outputs = await run_disaggregated(running, spec)
        await running.prefill.wait_until_free()
        await running.decode.wait_until_free()
    assert tokens_of(outputs) == reference_answer(spec)[0]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    details = outputs[1].details
    assert details["transport"] == "memory"
    assert int(details["kv_transfer_bytes"]) == -(-length // 4) * 4 * 8


@pytest.mark.parametrize(("length", "temperature"), [(1, 0.0), (7, 1.0), (40, 0.0)])
async def test_a_draining_worker_migrates_its_requests(length: int, temperature: float) -> None:
    """The request continues on another worker with its KV; nothing is computed again."""
    prompt = list(range(1, length + 1))
    spec = request("r", prompt, 150, repetition_penalty=1.1)
    spec = replace(spec, sampling=replace(spec.sampling, temperature=temperature, seed=5))
    async with cluster(config=WorkerConfig(drain_grace_seconds=0.0)) as running:
        source, target = running.decode, running.prefill
        gate = source.runner.close_after(8)
        stream = source.worker.open_stream()
        stream.submit(spec, Task.PREFILL_AND_DECODE, None)
        outputs = await collect(stream, lambda outputs: len(outputs) >= 2)
        source.worker.start_drain()
        await gate.open_slowly(stream, outputs)
        moved = outputs.pop()
        assert moved.finish_reason is FinishReason.MIGRATED
        generated = tokens_of(outputs)
        assert moved.first_index == len(generated) > 2
        continued = replace(spec, epoch=Epoch(2), token_ids=spec.token_ids + generated[:-1])
        other = target.worker.open_stream()
        other.submit(continued, Task.DECODE, source.ref)
        rest = await collect(other, is_finished)
        await source.wait_until_free()
        await target.wait_until_free()
    assert tokens_of([*outputs, *rest]) == reference_answer(spec)[0]
    assert int(rest[0].details["kv_transfer_bytes"]) == -(-(length + len(generated) - 1) // 4) * 32


async def test_blocks_cached_on_the_decode_worker_are_not_transferred_again() -> None:
    async with cluster() as running:
        first = await run_disaggregated(running, request("a", list(range(40)), 4))
        again = await run_disaggregated(running, request("b", list(range(40)), 4))
    assert tokens_of(first) == tokens_of(again)
    assert int(first[1].details["kv_transfer_bytes"]) == 10 * 32
    # The prompt's last block is never a cache hit: its last token is always computed.
    assert int(again[1].details["kv_transfer_bytes"]) <= 32


async def test_many_concurrent_requests_complete_with_few_decode_blocks() -> None:
    chance = np.random.default_rng(SEED)
    specs = [
        request(f"r{n}", chance.integers(100, size=int(chance.integers(1, 60))).tolist(), 12)
        for n in range(40)
    ]
    async with cluster(prefill_blocks=64, decode_blocks=40) as running:
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(run_disaggregated(running, spec)) for spec in specs]
        await running.prefill.wait_until_free()
        await running.decode.wait_until_free()
    for spec, answer in zip(specs, answers, strict=True):
        assert tokens_of(answer.result()) == reference_answer(spec)[0]


async def test_cancelling_at_any_moment_frees_all_blocks() -> None:
    chance = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    async with cluster(prefill_blocks=64, decode_blocks=64) as running:
        for number in range(60):
            spec = request(f"r{number}", chance.integers(100, size=50).tolist(), 30)
            task = asyncio.create_task(run_disaggregated(running, spec))
            for _ in range(int(chance.integers(0, 40))):
                await asyncio.sleep(0)
            if chance.random() < 0.5:
                await asyncio.sleep(float(chance.random()) * 0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            running.prefill.worker._cancel(spec.request_id, spec.epoch)
            running.decode.worker._cancel(spec.request_id, spec.epoch)
        await running.prefill.wait_until_free()
        await running.decode.wait_until_free()


async def test_closing_a_stream_ends_its_requests() -> None:
    async with cluster() as running:
        prefill = running.prefill.worker.open_stream()
        decode = running.decode.worker.open_stream()
        for number in range(5):
            spec = request(f"r{number}", list(range(30)), 200)
            prefill.submit(spec, Task.PREFILL, None)
            decode.submit(spec, Task.DECODE, running.prefill.ref)
        await collect(decode, bool)
        prefill.close()
        decode.close()
        await running.prefill.wait_until_free()
        await running.decode.wait_until_free()


async def test_a_corrupt_read_is_retried_once() -> None:
    damaged = []

    def fault(endpoint: Endpoint, span: TransferRange) -> str:
        damaged.append(span)
        return "corrupt" if len(damaged) == 1 else ""

    spec = request("r", list(range(40)), 8)
    async with cluster() as running:
        running.fabric.fault = fault
        outputs = await run_disaggregated(running, spec)
    assert tokens_of(outputs) == reference_answer(spec)[0]


@pytest.mark.parametrize("fault", ["corrupt", "lost"])
async def test_a_persistent_read_failure_fails_the_request_and_frees_both_sides(fault: str) -> None:
    async with cluster() as running:
        running.fabric.fault = lambda endpoint, span: fault
        spec = request("r", list(range(40)), 8)
        prefill, decode = (each.worker.open_stream() for each in (running.prefill, running.decode))
        prefill.submit(spec, Task.PREFILL, None)
        decode.submit(spec, Task.DECODE, running.prefill.ref)
        # The reader may disconnect before the prefill worker has sent its token, which is
        # therefore not awaited.
        outputs = await collect(decode, is_finished)
        prefill.close()
        decode.close()
        await running.prefill.wait_until_free()
        await running.decode.wait_until_free()
    assert outputs[-1].finish_reason is FinishReason.ERROR
    status = {"corrupt": "DATA_LOSS", "lost": "UNAVAILABLE"}[fault]
    assert outputs[-1].details["error_status"] == status


class ScriptedSource:
    """A KV source that sends the given events, which may be false or malformed, and then none."""

    def __init__(self, *events: KvTransferEvent) -> None:
        self._events = list(events)

    @asynccontextmanager
    async def open_kv_import(
        self, address: str, opening: KvTransferOpen
    ) -> AsyncIterator["ScriptedSource"]:
        yield self

    async def next_event(self) -> KvTransferEvent:
        if not self._events:
            await asyncio.get_running_loop().create_future()
        return self._events.pop(0)

    async def acknowledge(self, num_blocks: int) -> None: ...

    async def ended(self) -> None:
        await asyncio.get_running_loop().create_future()


class InvalidTokenSource:
    """Connects to real KV sources, but replaces the first token that they report by a token outside
    the vocabulary."""

    def __init__(self, peers: KvImportConnector) -> None:
        self._peers = peers

    @asynccontextmanager
    async def open_kv_import(self, address: str, opening: KvTransferOpen) -> AsyncIterator[Any]:
        async with self._peers.open_kv_import(address, opening) as reader:
            next_real_event = reader.next_event

            async def next_event() -> KvTransferEvent:
                event = await next_real_event()
                return (
                    KvTransferDone(TokenId(256), False)
                    if isinstance(event, KvTransferDone)
                    else event
                )

            reader.next_event = next_event  # type: ignore[method-assign]
            yield reader


def scheduled(**changes: Any) -> KvTransferScheduled:
    endpoint = Endpoint("memory", "prefill", 1, "here", 128 * 32, b"")
    return KvTransferScheduled(replace(endpoint, **changes), 40, CHECKSUM_XXH3)


def chunk(first: int, count: int, offset: int = 0, size: int = 32) -> KvTransferChunk:
    return KvTransferChunk(first, (BlockRef(offset, size, 0, BlockKey(b"")),) * count)


DONE = KvTransferDone(TokenId(5), False)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([DONE], "must begin with KvTransferScheduled, not KvTransferDone"),
        ([scheduled(), DONE], "ended the transfer after 0 of 10 blocks"),
        ([scheduled(), scheduled()], "unexpected KvTransferScheduled"),
        ([scheduled(), chunk(0, 0)], "they must follow"),
        ([scheduled(), chunk(1, 9)], "they must follow"),
        ([scheduled(), chunk(0, 11)], "they must follow"),
        (
            [scheduled(), chunk(0, 10, size=31)],
            "block of 31 bytes in codec none; such blocks have 32",
        ),
        ([scheduled(), chunk(0, 10, offset=128 * 32)], "lies outside the remote region"),
        ([scheduled(), chunk(0, 10)], "arrived damaged"),
        ([scheduled(owner="another")], "offers the memory of 'another'"),
        ([scheduled(generation=2)], "(generation 2)"),
        ([scheduled(transport="nixl")], "this worker did not offer"),
        ([scheduled(region_size_bytes=1)], "region of prefill has"),
        (
            [KvTransferScheduled(scheduled().endpoint, 39, CHECKSUM_XXH3)],
            "39 tokens, but the request has",
        ),
        ([KvTransferScheduled(scheduled().endpoint, 40, "md5")], "checksum algorithm 'md5', but"),
    ],
)
async def test_a_malformed_kv_transfer_fails_only_its_own_request(
    events: list[KvTransferEvent], error: str
) -> None:
    """The request fails with an error status on which the router retries it, and no token is
    computed from unwritten blocks."""
    async with cluster() as running:
        running.decode.kv_importer._connector = ScriptedSource(*events)
        stream = running.decode.worker.open_stream()
        stream.submit(request("r", list(range(40)), 8), Task.DECODE, running.prefill.ref)
        [output] = await collect(stream, bool)
        running.decode.kv_importer._connector = running.peers
        assert (output.token_ids, output.details["error_status"]) == ((), "DATA_LOSS")
        assert error in output.error
        spec = request("good", list(range(40)), 8)
        assert tokens_of(await run_disaggregated(running, spec)) == reference_answer(spec)[0]
        await running.decode.wait_until_free()


async def test_a_token_outside_the_vocabulary_fails_only_its_own_request() -> None:
    """If the worker did not reject the token, the embedding lookup would crash the worker."""
    async with cluster(vocab_size=256) as running:
        stream = running.decode.worker.open_stream()
        for name, prompt, task, changes in (
            ("prompt", [256], Task.PREFILL_AND_DECODE, {}),
            ("stop", [1], Task.PREFILL_AND_DECODE, {"stop_token_ids": (TokenId(256),)}),
            ("bias", [1], Task.PREFILL_AND_DECODE, {"logit_bias": ((TokenId(256), 1.0),)}),
            ("nan", [1], Task.PREFILL_AND_DECODE, {"presence_penalty": math.nan}),
        ):
            stream.submit(request(name, prompt, 8, **changes), task, None)
            [output] = await collect(stream, bool)
            assert output.details["error_status"] == "INVALID_ARGUMENT", name
        running.decode.kv_importer._connector = InvalidTokenSource(running.peers)
        running.prefill.worker.open_stream().submit(request("odd", [1], 8), Task.PREFILL, None)
        stream.submit(request("odd", [1], 8), Task.DECODE, running.prefill.ref)
        [output] = await collect(stream, bool)
        assert output.details["error_status"] == "DATA_LOSS"
        running.decode.kv_importer._connector = running.peers
        spec = request("good", [1, 2, 3], 8)
        assert tokens_of(await run_disaggregated(running, spec)) == reference_answer(spec)[0]
        await running.decode.wait_until_free()


async def test_an_unreachable_source_is_reported_as_unavailable() -> None:
    async with cluster() as running:
        stream = running.decode.worker.open_stream()
        unreachable = WorkerRef(WorkerId("unreachable"), "unreachable", Incarnation(1))
        stream.submit(request("r", [1, 2, 3], 8), Task.DECODE, unreachable)
        outputs = await collect(stream, bool)
        await running.decode.wait_until_free()
    assert outputs[0].details["error_status"] == "UNAVAILABLE"


async def test_a_reader_for_an_unknown_request_or_another_incarnation_is_refused() -> None:
    async with cluster(config=WorkerConfig(arrival_timeout_seconds=0.01)) as running:
        worker = running.prefill.worker
        opening = KvTransferOpen("r/1", 1, 1, DIGEST_HEX, "fake", ("memory",), "here")  # type: ignore[arg-type]
        with pytest.raises(NotFound, match="r/1 is not on this worker"):
            await worker.open_kv_export(opening)
        for change in (
            {"source_generation": 2},
            {"model_digest": "other"},
            {"kv_layout": "other"},
            {"transports": ("nixl",)},
        ):
            with pytest.raises((NotFound, Invalid)):
                await worker.open_kv_export(KvTransferOpen(**{**as_dict(opening), **change}))


async def test_an_export_that_no_worker_reads_is_dropped() -> None:
    async with cluster(config=WorkerConfig(export_timeout_seconds=0.0)) as running:
        stream = running.prefill.worker.open_stream()
        stream.submit(request("r", list(range(20)), 8), Task.PREFILL, None)
        outputs = await collect(stream, lambda outputs: len(outputs) == 2)
        await running.prefill.wait_until_free()
    assert outputs[1].error == "no decode worker imported the request's KV in time"


async def test_a_newer_placement_replaces_the_older_one() -> None:
    async with cluster() as running:
        stream = running.prefill.worker.open_stream()
        stream.submit(request("r", list(range(200)), 8, epoch=1), Task.PREFILL, None)
        stream.submit(request("r", list(range(200)), 8, epoch=2), Task.PREFILL_AND_DECODE, None)
        stream.submit(request("r", list(range(200)), 8, epoch=2), Task.PREFILL_AND_DECODE, None)
        outputs = await collect(
            stream, lambda o: any(x.finish_reason is FinishReason.LENGTH for x in o)
        )
        await running.prefill.wait_until_free()
    refused = [output for output in outputs if output.finish_reason is FinishReason.ERROR]
    assert [output.details["error_status"] for output in refused] == ["INVALID_ARGUMENT"]
    whole = [output for output in outputs if output.finish_reason is not FinishReason.ERROR]
    assert {output.epoch for output in whole} == {2}
    assert tokens_of(whole) == reference_answer(request("r", list(range(200)), 8))[0]


async def test_a_draining_worker_refuses_new_requests() -> None:
    async with cluster() as running:
        running.decode.worker.start_drain()
        stream = running.decode.worker.open_stream()
        stream.submit(request("r", [1, 2, 3], 8), Task.PREFILL_AND_DECODE, None)
        outputs = await collect(stream, bool)
    assert outputs[0].finish_reason is FinishReason.REROUTED


DIGEST_HEX = (b"m" * 16).hex()


def as_dict(opening: KvTransferOpen) -> dict[str, object]:
    return {name: getattr(opening, name) for name in KvTransferOpen.__dataclass_fields__}
