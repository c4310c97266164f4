"""Hand-offs between two workers: whole, cancelled anywhere, damaged, and cut off."""

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
from baton.engine.fake_runner import reference_answer
from baton.errors import Invalid, NotFound
from baton.rpc.worker_client import KvImportConnector
from baton.transport.base import TransferRange
from baton.worker.worker import WorkerConfig
from tests.grammar_house import EOS, answers, asking, byte_grammars, choice, regex, schema
from tests.sim.worker_cluster import (
    Cluster,
    cluster,
    collect,
    is_finished,
    request,
    tokens_of,
)

SEED = 7


async def hand_off(running: Cluster, spec, cancel_after: int | None = None):  # type: ignore[no-untyped-def]
    """Runs one request over both workers; cancels after that many decoded tokens."""
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
async def test_an_answer_keeps_to_its_grammar_across_a_handoff(seed: int) -> None:
    """The prefill worker's token, too, is one that the grammar allows."""
    grammars = byte_grammars()
    for grammar in (choice("yes", "yesterday", "no"), regex("[0-9]{3,6}:x*"), schema({"const": 5})):
        spec = asking("r", grammar, seed, max_tokens=40)
        text, reason = answers(grammars, [spec])["r"]
        async with cluster(constraints=grammars, eos=frozenset({EOS})) as running:
            outputs = await hand_off(running, spec)
            await running.decode.wait_until_free()
        assert bytes(t for t in tokens_of(outputs) if t != EOS) == text
        assert outputs[-1].finish_reason is reason


async def test_a_grammar_that_fails_ends_its_request_and_nothing_else() -> None:
    grammars = byte_grammars()
    refused = [Grammar(GrammarKind.REGEX, "("), schema({"$ref": "#"})]
    async with cluster(constraints=grammars, eos=frozenset({EOS})) as running:
        for number, grammar in enumerate(refused):
            stream = running.prefill.worker.open_stream()
            stream.submit(asking(str(number), grammar, 1), Task.PREFILL, None)
            (output,) = await collect(stream, bool)
            assert output.finish_reason is FinishReason.ERROR
            assert output.details["error_status"] == "INVALID_ARGUMENT"
            stream.close()
        good = await hand_off(running, asking("good", choice("yes"), 1))
        await running.prefill.wait_until_free()
    assert tokens_of(good) == (*b"yes", EOS)


async def test_a_worker_without_grammars_refuses_them() -> None:
    async with cluster() as running:
        stream = running.prefill.worker.open_stream()
        stream.submit(asking("r", choice("yes"), 1), Task.WHOLE, None)
        (output,) = await collect(stream, bool)
        stream.close()
    assert output.finish_reason is FinishReason.ERROR
    assert output.error == "this worker can't follow grammars"


async def test_a_prompt_is_scored_across_a_handoff_and_whatever_is_cached() -> None:
    prompt = list(range(1, 42))
    async with cluster() as running:
        await hand_off(running, request("warm", prompt, 3))
        outputs = await hand_off(running, request("r", prompt, 3, prompt_logprobs=0))
        again = await hand_off(running, request("s", prompt, 3, prompt_logprobs=0))
        await running.decode.wait_until_free()
    assert [score.token_id for score in outputs[0].prompt_logprobs] == prompt[1:]
    assert outputs[0].cached_tokens == 0
    assert not any(output.prompt_logprobs for output in outputs[1:])
    assert again[0].prompt_logprobs == outputs[0].prompt_logprobs


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 40, 100])
async def test_a_handed_over_request_answers_as_if_alone(length: int) -> None:
    spec = request("r", list(range(1, length + 1)), 20)
    async with cluster() as running:
        outputs = await hand_off(running, spec)
        await running.prefill.wait_until_free()
        await running.decode.wait_until_free()
    assert tokens_of(outputs) == reference_answer(spec)[0]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    details = outputs[1].details
    assert details["transport"] == "memory"
    assert int(details["bytes_shipped"]) == -(-length // 4) * 4 * 8


@pytest.mark.parametrize(("length", "temperature"), [(1, 0.0), (7, 1.0), (40, 0.0)])
async def test_a_draining_worker_hands_its_answers_on(length: int, temperature: float) -> None:
    """Answers go on elsewhere, from where they are; nothing is computed again."""
    prompt = list(range(1, length + 1))
    spec = request("r", prompt, 150, repetition_penalty=1.1)
    spec = replace(spec, sampling=replace(spec.sampling, temperature=temperature, seed=5))
    async with cluster(config=WorkerConfig(finish_seconds=0.0)) as running:
        source, heir = running.decode, running.prefill
        gate = source.runner.close_after(8)
        stream = source.worker.open_stream()
        stream.submit(spec, Task.WHOLE, None)
        outputs = await collect(stream, lambda outputs: len(outputs) >= 2)
        source.worker.start_drain()
        await gate.open_slowly(stream, outputs)
        moved = outputs.pop()
        assert moved.finish_reason is FinishReason.MOVED
        known = tokens_of(outputs)
        assert moved.first_index == len(known) > 2
        going_on = replace(spec, epoch=Epoch(2), token_ids=spec.token_ids + known[:-1])
        other = heir.worker.open_stream()
        other.submit(going_on, Task.DECODE, source.ref)
        rest = await collect(other, is_finished)
        await source.wait_until_free()
        await heir.wait_until_free()
    assert tokens_of([*outputs, *rest]) == reference_answer(spec)[0]
    assert int(rest[0].details["bytes_shipped"]) == -(-(length + len(known) - 1) // 4) * 32


async def test_what_the_decode_worker_has_is_not_shipped_again() -> None:
    async with cluster() as running:
        first = await hand_off(running, request("a", list(range(40)), 4))
        again = await hand_off(running, request("b", list(range(40)), 4))
    assert tokens_of(first) == tokens_of(again)
    assert int(first[1].details["bytes_shipped"]) == 10 * 32
    # The last block is never shared: its last token is computed by the source.
    assert int(again[1].details["bytes_shipped"]) <= 32


async def test_many_at_once_with_little_room_on_the_decode_side() -> None:
    chance = np.random.default_rng(SEED)
    specs = [
        request(f"r{n}", chance.integers(100, size=int(chance.integers(1, 60))).tolist(), 12)
        for n in range(40)
    ]
    async with cluster(prefill_blocks=64, decode_blocks=40) as running:
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(hand_off(running, spec)) for spec in specs]
        await running.prefill.wait_until_free()
        await running.decode.wait_until_free()
    for spec, answer in zip(specs, answers, strict=True):
        assert tokens_of(answer.result()) == reference_answer(spec)[0]


async def test_cancelled_at_any_moment_everything_is_freed() -> None:
    chance = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    async with cluster(prefill_blocks=64, decode_blocks=64) as running:
        for number in range(60):
            spec = request(f"r{number}", chance.integers(100, size=50).tolist(), 30)
            task = asyncio.create_task(hand_off(running, spec))
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


async def test_a_broken_stream_is_the_end_of_what_came_over_it() -> None:
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


async def test_a_damaged_read_is_repeated_once() -> None:
    damaged = []

    def fault(endpoint: Endpoint, span: TransferRange) -> str:
        damaged.append(span)
        return "corrupt" if len(damaged) == 1 else ""

    spec = request("r", list(range(40)), 8)
    async with cluster() as running:
        running.fabric.fault = fault
        outputs = await hand_off(running, spec)
    assert tokens_of(outputs) == reference_answer(spec)[0]


@pytest.mark.parametrize("fault", ["corrupt", "lost"])
async def test_a_link_that_stays_bad_is_an_error_and_frees_both_sides(fault: str) -> None:
    async with cluster() as running:
        running.fabric.fault = lambda endpoint, span: fault
        spec = request("r", list(range(40)), 8)
        prefill, decode = (each.worker.open_stream() for each in (running.prefill, running.decode))
        prefill.submit(spec, Task.PREFILL, None)
        decode.submit(spec, Task.DECODE, running.prefill.ref)
        # The prefill worker may be left by its reader before or after its token.
        outputs = await collect(decode, is_finished)
        prefill.close()
        decode.close()
        await running.prefill.wait_until_free()
        await running.decode.wait_until_free()
    assert outputs[-1].finish_reason is FinishReason.ERROR
    status = {"corrupt": "DATA_LOSS", "lost": "UNAVAILABLE"}[fault]
    assert outputs[-1].details["error_status"] == status


class LyingSource:
    """A source that says what it is told to say, instead of what is so."""

    def __init__(self, *events: KvTransferEvent) -> None:
        self._events = list(events)

    @asynccontextmanager
    async def pull(self, address: str, opening: KvTransferOpen) -> AsyncIterator["LyingSource"]:
        yield self

    async def next_event(self) -> KvTransferEvent:
        return self._events.pop(0)

    async def acknowledge(self, num_blocks: int) -> None: ...

    async def ended(self) -> None:
        await asyncio.get_running_loop().create_future()


class OddTokens:
    """Sources that end with a token that there is not."""

    def __init__(self, peers: KvImportConnector) -> None:
        self._peers = peers

    @asynccontextmanager
    async def pull(self, address: str, opening: KvTransferOpen) -> AsyncIterator[Any]:
        async with self._peers.pull(address, opening) as reader:
            sound = reader.next_event

            async def next_event() -> KvTransferEvent:
                event = await sound()
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
    ("events", "why"),
    [
        ([DONE], "begins with `scheduled`, not KvTransferDone"),
        ([scheduled(), DONE], "shipped 0 of 10 blocks"),
        ([scheduled(), scheduled()], "unexpected KvTransferScheduled"),
        ([scheduled(), chunk(0, 0)], "do not follow"),
        ([scheduled(), chunk(1, 9)], "do not follow"),
        ([scheduled(), chunk(0, 11)], "do not follow"),
        ([scheduled(), chunk(0, 10, size=31)], "a block has 32 bytes"),
        ([scheduled(), chunk(0, 10, offset=128 * 32)], "lies outside its regions"),
        ([scheduled(), chunk(0, 10)], "arrived damaged"),
        ([scheduled(owner="another")], "offers the memory of 'another'"),
        ([scheduled(generation=2)], "of life 2"),
        ([scheduled(transport="nixl")], "was not offered"),
        ([scheduled(region_size_bytes=1)], "region of prefill has"),
        ([KvTransferScheduled(scheduled().endpoint, 39, CHECKSUM_XXH3)], "39 tokens, not 40"),
        ([KvTransferScheduled(scheduled().endpoint, 40, "md5")], "unknown checksum algorithm"),
    ],
)
async def test_a_source_that_lies_fails_one_request(
    events: list[KvTransferEvent], why: str
) -> None:
    """As something that another placement mends; and no answer comes from unwritten blocks."""
    async with cluster() as running:
        running.decode.worker._intake._peers = LyingSource(*events)
        stream = running.decode.worker.open_stream()
        stream.submit(request("r", list(range(40)), 8), Task.DECODE, running.prefill.ref)
        [output] = await collect(stream, bool)
        running.decode.worker._intake._peers = running.peers
        assert (output.token_ids, output.details["error_status"]) == ((), "DATA_LOSS")
        assert why in output.error
        spec = request("good", list(range(40)), 8)
        assert tokens_of(await hand_off(running, spec)) == reference_answer(spec)[0]
        await running.decode.wait_until_free()


async def test_a_token_that_the_model_does_not_have_fails_one_request() -> None:
    """To look it up would end the worker."""
    async with cluster(vocab_size=256) as running:
        stream = running.decode.worker.open_stream()
        for name, prompt, task, changes in (
            ("prompt", [256], Task.WHOLE, {}),
            ("stop", [1], Task.WHOLE, {"stop_token_ids": (TokenId(256),)}),
            ("bias", [1], Task.WHOLE, {"logit_bias": ((TokenId(256), 1.0),)}),
            ("nan", [1], Task.WHOLE, {"presence_penalty": math.nan}),
        ):
            stream.submit(request(name, prompt, 8, **changes), task, None)
            [output] = await collect(stream, bool)
            assert output.details["error_status"] == "INVALID_ARGUMENT", name
        running.decode.worker._intake._peers = OddTokens(running.peers)
        running.prefill.worker.open_stream().submit(request("odd", [1], 8), Task.PREFILL, None)
        stream.submit(request("odd", [1], 8), Task.DECODE, running.prefill.ref)
        [output] = await collect(stream, bool)
        assert output.details["error_status"] == "DATA_LOSS"
        running.decode.worker._intake._peers = running.peers
        spec = request("good", [1, 2, 3], 8)
        assert tokens_of(await hand_off(running, spec)) == reference_answer(spec)[0]
        await running.decode.wait_until_free()


async def test_a_source_that_is_gone_is_unavailable() -> None:
    async with cluster() as running:
        stream = running.decode.worker.open_stream()
        nobody = WorkerRef(WorkerId("nobody"), "nobody", Incarnation(1))
        stream.submit(request("r", [1, 2, 3], 8), Task.DECODE, nobody)
        outputs = await collect(stream, bool)
        await running.decode.wait_until_free()
    assert outputs[0].details["error_status"] == "UNAVAILABLE"


async def test_a_reader_for_an_unknown_request_or_another_life_is_refused() -> None:
    async with cluster(config=WorkerConfig(arrival_seconds=0.01)) as running:
        worker = running.prefill.worker
        opening = KvTransferOpen("r/1", 1, 1, DIGEST_HEX, "fake", ("memory",), "here")  # type: ignore[arg-type]
        with pytest.raises(NotFound, match="r/1 is not here"):
            await worker.open_pull(opening)
        for change in (
            {"source_generation": 2},
            {"model_digest": "other"},
            {"kv_layout": "other"},
            {"transports": ("nixl",)},
        ):
            with pytest.raises((NotFound, Invalid)):
                await worker.open_pull(KvTransferOpen(**{**as_dict(opening), **change}))


async def test_a_prompt_that_no_reader_comes_for_is_dropped() -> None:
    async with cluster(config=WorkerConfig(hold_seconds=0.0)) as running:
        stream = running.prefill.worker.open_stream()
        stream.submit(request("r", list(range(20)), 8), Task.PREFILL, None)
        outputs = await collect(stream, lambda outputs: len(outputs) == 2)
        await running.prefill.wait_until_free()
    assert outputs[1].error == "no decode worker came for the request"


async def test_a_newer_placement_replaces_the_older_one() -> None:
    async with cluster() as running:
        stream = running.prefill.worker.open_stream()
        stream.submit(request("r", list(range(200)), 8, epoch=1), Task.PREFILL, None)
        stream.submit(request("r", list(range(200)), 8, epoch=2), Task.WHOLE, None)
        stream.submit(request("r", list(range(200)), 8, epoch=2), Task.WHOLE, None)
        outputs = await collect(
            stream, lambda o: any(x.finish_reason is FinishReason.LENGTH for x in o)
        )
        await running.prefill.wait_until_free()
    refused = [output for output in outputs if output.finish_reason is FinishReason.ERROR]
    assert [output.details["error_status"] for output in refused] == ["INVALID_ARGUMENT"]
    whole = [output for output in outputs if output.finish_reason is not FinishReason.ERROR]
    assert {output.epoch for output in whole} == {2}
    assert tokens_of(whole) == reference_answer(request("r", list(range(200)), 8))[0]


async def test_a_draining_worker_takes_nothing_new() -> None:
    async with cluster() as running:
        running.decode.worker.start_drain()
        stream = running.decode.worker.open_stream()
        stream.submit(request("r", [1, 2, 3], 8), Task.WHOLE, None)
        outputs = await collect(stream, bool)
    assert outputs[0].finish_reason is FinishReason.TURNED_AWAY


DIGEST_HEX = (b"m" * 16).hex()


def as_dict(opening: KvTransferOpen) -> dict[str, object]:
    return {name: getattr(opening, name) for name in KvTransferOpen.__dataclass_fields__}
