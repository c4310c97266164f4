"""Tests mock workers in virtual time: tokens, order, speed, states and reports."""

import asyncio

import pytest

from baton.config import load_settings
from baton.core.ids import Epoch, Incarnation, RequestId, TokenId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import FinishReason, RequestOutput, RequestSpec
from baton.core.states import Role, WorkerState
from baton.core.task import Task
from baton.errors import Invalid
from baton.rpc.output_encoder import OutputEncoder, encode_output
from baton.worker.mock.model import MockModel
from baton.worker.mock.output_stream import MAX_UNREAD_BYTES, MockStream
from baton.worker.mock.program import MockProgram, config_from_settings, mock_worker_ids
from tests.unit.baton.worker.mock.mock_workers import (
    LEXICON,
    STEP,
    collect,
    in_virtual_time,
    read,
    ref,
    shared_state,
    spec,
    tokens,
    worker,
)

# -- settings --------------------------------------------------------------------------------


def test_mock_workers_of_a_process_come_from_the_settings() -> None:
    redis = "redis://127.0.0.1:1/0"
    settings = load_settings(redis_url=redis, id="m", mock_prefill=2, mock_decode=1)
    assert mock_worker_ids(settings) == [
        ("m-prefill-0", Role.PREFILL), ("m-prefill-1", Role.PREFILL), ("m-decode-0", Role.DECODE)
    ]  # fmt: skip
    at_once = load_settings(mock_prefill_tokens_per_second=0, mock_step_seconds=0)
    assert config_from_settings(at_once).prefill_cost.seconds(1000) == 0
    assert config_from_settings(load_settings()).prefill_cost.seconds(1000) == 0.05
    both = load_settings(redis_url=redis, id="m", mock_prefill=0, mock_decode=0, mock_mixed=1)
    assert mock_worker_ids(both) == [("m-mixed-0", Role.MIXED)]
    with pytest.raises(Invalid, match="all 0"):
        MockProgram(load_settings(redis_url=redis, mock_prefill=0, mock_decode=0))
    with pytest.raises(Invalid, match="grpc_port"):
        MockProgram(load_settings(redis_url=redis, grpc_port=5000))


# -- messages --------------------------------------------------------------------------------


def test_encoded_outputs_are_messages() -> None:
    """The concatenation of several encoded outputs, with small and large numbers, is a valid
    message."""
    answer = OutputEncoder(RequestId("r" * 200), Epoch(3))
    parts = [answer.encode_token(0, TokenId(0)), answer.encode_token(130, TokenId(151_000))]
    parts.append(answer.encode_last_token(131, TokenId(7), FinishReason.LENGTH))
    outputs = read(b"".join(parts))
    base = {"request_id": "r" * 200, "epoch": 3}
    assert outputs == [
        RequestOutput(**base, first_index=0, token_ids=(TokenId(0),)),
        RequestOutput(**base, first_index=130, token_ids=(TokenId(151_000),)),
        RequestOutput(
            **base, first_index=131, token_ids=(TokenId(7),), finish_reason=FinishReason.LENGTH
        ),
    ]  # fmt: skip
    assert all(read(encode_output(output)) == [output] for output in outputs)


# -- answers ---------------------------------------------------------------------------------


def test_answer_depends_on_prompt_and_seed() -> None:
    greedy, warm = spec(), spec(temperature=1.0, seed=7)
    assert LEXICON.expected_answer(greedy) == LEXICON.expected_answer(spec(seed=7))
    assert LEXICON.expected_answer(warm) == LEXICON.expected_answer(
        spec("other", temperature=1.0, seed=7)
    )
    answers = [greedy, warm, spec(temperature=1.0, seed=8), spec(length=21)]
    assert len({tuple(LEXICON.expected_answer(each)) for each in answers}) == 4
    assert len(set(LEXICON.expected_answer(spec(max_tokens=64)))) == 64
    with pytest.raises(Invalid, match="no plain-text token"):
        MockModel([])


def test_whole_request_takes_the_configured_time() -> None:
    """The 20 tokens of the prompt take 0.01 s each; then a token is generated every half second."""

    async def main() -> None:
        one = worker(shared_state())
        stream = one.open_stream()
        stream.submit(spec(), Task.PREFILL_AND_DECODE, None)
        loop, times, outputs = asyncio.get_running_loop(), [], []
        while len(outputs) < 5:
            outputs += read(await stream.next_message())
            times.append(round(loop.time(), 3))
        assert times == [0.2, 0.7, 1.2, 1.7, 2.2]
        assert tokens(outputs) == LEXICON.expected_answer(spec())
        assert [output.finish_reason for output in outputs] == [None] * 4 + [FinishReason.LENGTH]
        assert one.is_idle

    in_virtual_time(main())


def test_answers_of_one_step_share_a_message() -> None:
    async def main() -> None:
        one = worker(shared_state())
        stream, other = one.open_stream(), one.open_stream()
        for number in range(4):
            stream.submit(spec(f"r{number}", 10), Task.PREFILL_AND_DECODE, None)
        other.submit(spec("s", 10), Task.PREFILL_AND_DECODE, None)
        assert len(await collect(stream, 4)) == 20
        assert len(await collect(other)) == 5

    in_virtual_time(main())


def test_without_a_step_time_tokens_come_as_fast_as_they_are_read() -> None:
    async def main() -> None:
        one = worker(shared_state(step_seconds=0.0))
        stream = one.open_stream()
        stream.submit(spec(max_tokens=3), Task.PREFILL_AND_DECODE, None)
        messages = [read(await stream.next_message()) for _ in range(2)]
        assert [len(outputs) for outputs in messages] == [2, 1]
        assert tokens(messages[0] + messages[1]) == LEXICON.expected_answer(spec(max_tokens=3))
        assert asyncio.get_running_loop().time() == pytest.approx(0.2)

    in_virtual_time(main())


def test_answer_ends_at_stop_tokens_or_max_tokens() -> None:
    third = LEXICON.expected_answer(spec())[2]

    async def main() -> None:
        one = worker(shared_state())
        stream = one.open_stream()
        stream.submit(spec(stop_token_ids=(third,), logprobs=2), Task.PREFILL_AND_DECODE, None)
        outputs = await collect(stream)
        assert tokens(outputs) == LEXICON.expected_answer(spec())[:3]
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert [len(output.logprobs[0].top) for output in outputs] == [2, 2, 2]
        stream.submit(spec("one", max_tokens=1), Task.PREFILL_AND_DECODE, None)
        assert len(await collect(stream)) == 1
        assert one.is_idle

    in_virtual_time(main())


# -- KV transfers ----------------------------------------------------------------------------


@pytest.mark.parametrize("decode_first", [True, False])
def test_request_continues_on_the_decode_worker(decode_first: bool) -> None:
    async def main() -> None:
        place = shared_state()
        prefill, decode = worker(place, "p0", Role.PREFILL), worker(place, "d0")
        first, rest = prefill.open_stream(), decode.open_stream()
        if decode_first:
            rest.submit(spec(), Task.DECODE, ref(prefill))
        first.submit(spec(), Task.PREFILL, None)
        outputs = read(await first.next_message())
        if not decode_first:
            rest.submit(spec(), Task.DECODE, ref(prefill))
        outputs += await collect(rest)
        assert tokens(outputs) == LEXICON.expected_answer(spec())
        assert [output.first_index for output in outputs] == [0, 1, 2, 3, 4]
        assert prefill.is_idle and decode.is_idle

    in_virtual_time(main())


def test_answer_that_ends_with_its_first_token_is_not_decoded() -> None:
    async def main() -> None:
        place = shared_state()
        prefill, decode = worker(place, "p0", Role.PREFILL), worker(place, "d0")
        first, rest = prefill.open_stream(), decode.open_stream()
        rest.submit(spec(max_tokens=1), Task.DECODE, ref(prefill))
        first.submit(spec(max_tokens=1), Task.PREFILL, None)
        assert read(await first.next_message())[0].finish_reason is FinishReason.LENGTH
        assert prefill.is_idle and decode.is_idle

    in_virtual_time(main())


def test_source_in_another_process_takes_the_same_prefill_time() -> None:
    async def main() -> None:
        decode = worker(shared_state())
        stream = decode.open_stream()
        elsewhere = WorkerRef(WorkerId("far"), "127.0.0.1:2", Incarnation(5))
        stream.submit(spec(max_tokens=2), Task.DECODE, elsewhere)
        assert tokens(await collect(stream)) == LEXICON.expected_answer(spec())[1:2]
        assert asyncio.get_running_loop().time() == pytest.approx(0.2 + STEP)

    in_virtual_time(main())


def test_failover_continues_with_the_next_token() -> None:
    async def main() -> None:
        whole = LEXICON.expected_answer(spec())
        again = spec(epoch=2)
        again = RequestSpec(
            again.request_id, again.epoch, (*again.token_ids, *whole[:2]), 20, again.sampling
        )
        one = worker(shared_state())
        stream = one.open_stream()
        stream.submit(again, Task.PREFILL_AND_DECODE, None)
        outputs = await collect(stream)
        assert tokens(outputs) == whole[2:]
        assert outputs[0].first_index == 2

    in_virtual_time(main())


def test_invalid_submissions_are_refused() -> None:
    async def main() -> None:
        place = shared_state()
        one, other = worker(place), worker(place, "p0", Role.PREFILL)
        stream = one.open_stream()
        stream.submit(spec(), Task.DECODE, None)
        stream.submit(spec(), Task.DECODE, ref(other, generation=2))
        stream.submit(spec(epoch=2), Task.PREFILL_AND_DECODE, None)
        stream.submit(spec("p", prompt_logprobs=1), Task.PREFILL_AND_DECODE, None)
        stream.submit(spec(epoch=2), Task.PREFILL_AND_DECODE, None)
        refused = read(await stream.next_message())
        assert [output.details["error_status"] for output in refused] == [
            "INVALID_ARGUMENT", "NOT_FOUND", "INVALID_ARGUMENT", "INVALID_ARGUMENT",
        ]  # fmt: skip
        assert "is already on this worker in epoch 2" in refused[-1].error
        assert "mock workers support neither grammars" in refused[-2].error

    in_virtual_time(main())


# -- cancellation and draining ---------------------------------------------------------------


def test_cancelled_and_disconnected_requests_free_everything() -> None:
    """Requests are cancelled, or their router disconnects, while they wait, while their prompt is
    computed, while their KV is transferred, or while they decode."""

    async def main() -> None:
        place = shared_state()
        prefill, decode = worker(place, "p0", Role.PREFILL), worker(place, "d0")
        first, rest = prefill.open_stream(), decode.open_stream()
        for name in ("a", "b", "c"):
            first.submit(spec(name), Task.PREFILL, None)
        rest.submit(spec("c"), Task.DECODE, ref(prefill))
        rest.submit(spec("w"), Task.PREFILL_AND_DECODE, None)
        await rest.next_message()
        rest.cancel(RequestId("w"), Epoch(0))
        assert not decode.is_idle
        rest.cancel(RequestId("w"), Epoch(1))
        first.cancel(RequestId("a"), Epoch(1))
        first.cancel(RequestId("unknown"), Epoch(1))
        assert [job.id for job in prefill._prefill_queue.waiting] == ["c"]
        first.close()
        rest.close()
        await asyncio.sleep(60)
        assert prefill.is_idle and decode.is_idle
        assert (prefill.load.queued_tokens, decode.load.context_tokens) == (0, 0)

    in_virtual_time(main())


def test_stream_that_is_not_read_is_closed() -> None:
    closed: list[MockStream] = []

    async def main() -> None:
        stream = MockStream(
            lambda *_: None, lambda *_: None, closed.append, None
        )  # fmt: skip
        for _ in range(5):
            stream.put(bytes(MAX_UNREAD_BYTES // 4))
        assert closed == [stream]
        with pytest.raises(Exception, match="unread"):
            await stream.next_message()

    in_virtual_time(main())


def test_drain_migrates_answers_to_remaining_workers() -> None:
    """Waiting requests are rerouted immediately; running ones migrate after two seconds."""

    async def main() -> None:
        place = shared_state()
        leaving, staying = worker(place, "d0"), worker(place, "d1")
        stream = leaving.open_stream()
        long = spec("long", max_tokens=50)
        stream.submit(long, Task.PREFILL_AND_DECODE, None)
        outputs = read(await stream.next_message())
        for name in ("next", "later"):
            stream.submit(spec(name), Task.PREFILL_AND_DECODE, None)
        leaving.start_drain()
        stream.submit(spec("new"), Task.PREFILL_AND_DECODE, None)
        ends = []
        while not leaving.is_idle:
            leaving.sweep()
            await asyncio.sleep(0.25)
        assert await stream.next_message() == b""  # the worker has made progress
        outputs += read(await stream.next_message())
        ends = [(o.request_id, o.finish_reason) for o in outputs if o.finish_reason is not None]
        assert (RequestId("new"), FinishReason.REROUTED) in ends
        assert (RequestId("later"), FinishReason.REROUTED) in ends
        assert ends[-1][1] is FinishReason.MIGRATED
        first_tokens = [token for o in outputs if o.request_id == "long" for token in o.token_ids]
        moved = next(o for o in outputs if o.request_id == "long" and o.finish_reason)
        assert moved.first_index == len(first_tokens)
        heir = RequestSpec(
            long.request_id, Epoch(2), (*long.token_ids, *first_tokens[:-1]), 20, long.sampling
        )  # fmt: skip
        elsewhere = staying.open_stream()
        elsewhere.submit(heir, Task.DECODE, ref(leaving))
        assert first_tokens + tokens(await collect(elsewhere)) == LEXICON.expected_answer(long)

    in_virtual_time(main())


def test_last_worker_finishes_its_answers_before_it_leaves() -> None:
    async def main() -> None:
        one = worker(shared_state())
        stream = one.open_stream()
        stream.submit(spec(max_tokens=20), Task.PREFILL_AND_DECODE, None)
        one.start_drain()
        while not one.is_idle:
            one.sweep()
            await asyncio.sleep(0.25)
        assert await stream.next_message() == b""  # the worker has made progress
        assert len(read(await stream.next_message())) == 20
        assert one.state is WorkerState.DRAINING

    in_virtual_time(main())


def test_converted_worker_takes_the_other_role_when_idle() -> None:
    async def main() -> None:
        one = worker(shared_state())
        one.convert(Role.PREFILL)
        assert (one.role, one.state) == (Role.DECODE, WorkerState.DRAINING)
        one.sweep()
        assert (one.role, one.state) == (Role.PREFILL, WorkerState.READY)

    in_virtual_time(main())
