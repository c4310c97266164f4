"""Tests the stream of a worker's outputs to a router, and how outputs are split into messages."""

import asyncio
from typing import Any

import pytest

from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import MAX_PROMPT_LOGPROBS, FinishReason, RequestOutput, TokenLogprob
from baton.errors import Invalid, Overloaded
from baton.rpc.convert.outputs import MAX_OUTPUTS, outputs_from_proto, outputs_to_proto
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import worker_pb2 as pb
from baton.worker.limits import MAX_MESSAGE_WEIGHT, MAX_UNREAD_OUTPUTS
from baton.worker.output_stream import MAX_UNREAD_LOGPROBS, OutputStream


def stream() -> OutputStream:
    return OutputStream(lambda *_: None, lambda *_: None, lambda _: None)


def scores(count: int, num_top: int) -> tuple[TokenLogprob, ...]:
    return (TokenLogprob(TokenId(1), -1.0, ((TokenId(2), -1.0),) * num_top),) * count


def output(
    number: int,
    logprobs: tuple[TokenLogprob, ...] = (),
    prompt_logprobs: tuple[TokenLogprob, ...] = (),
) -> RequestOutput:
    tokens = (TokenId(1),) * max(len(logprobs), 1)
    request_id = RequestId(str(number))
    return RequestOutput(request_id, Epoch(1), 0, tokens, logprobs, prompt_logprobs=prompt_logprobs)


async def test_all_pending_outputs_are_sent_together() -> None:
    outgoing, outputs = stream(), [output(number) for number in range(5)]
    for each in outputs:
        outgoing.put(each)
    assert await outgoing.next_outputs() == outputs


async def test_message_has_a_limited_number_of_outputs_and_logprobs() -> None:
    outgoing = stream()
    for number in range(2 * MAX_MESSAGE_WEIGHT + 1):
        outgoing.put(output(number))
    sizes = [len(await outgoing.next_outputs()) for _ in range(3)]
    assert sizes == [MAX_MESSAGE_WEIGHT, MAX_MESSAGE_WEIGHT, 1]
    for number in range(1000):
        outgoing.put(output(number, scores(2, 20)))  # weighs 1 + 2 * 21
    sizes = [len(await outgoing.next_outputs()) for _ in range(11)]
    assert sizes == [95] * 10 + [50]
    assert outputs_to_proto([output(1, scores(2, 20))] * 95).ByteSize() < 100_000


async def test_output_with_more_logprobs_than_a_message_is_sent_alone() -> None:
    outgoing, large = stream(), scores(MAX_PROMPT_LOGPROBS // 3, 2)
    for number, prompt_logprobs in enumerate([(), large, scores(10, 0), (), large]):
        outgoing.put(output(number, prompt_logprobs=prompt_logprobs))
    messages = [[each.request_id for each in await outgoing.next_outputs()] for _ in range(4)]
    assert messages == [["0"], ["1"], ["2", "3"], ["4"]]


async def test_other_tasks_run_between_messages() -> None:
    outgoing, events = stream(), []
    for number in range(2 * MAX_MESSAGE_WEIGHT):
        outgoing.put(output(number))

    async def read() -> None:
        for _ in range(2):
            await outgoing.next_outputs()
            events.append("message")

    async def run() -> None:
        for _ in range(2):
            events.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(read(), run())
    assert events == ["message", "other", "message", "other"]


async def test_stream_with_too_many_unread_outputs_is_closed() -> None:
    outgoing = stream()
    for number in range(MAX_UNREAD_OUTPUTS):
        outgoing.put(output(number))
    assert not outgoing.closed
    outgoing.put(output(-1))
    assert outgoing.closed


@pytest.mark.parametrize(
    "large",
    [
        output(1, prompt_logprobs=scores(MAX_UNREAD_LOGPROBS // 4, 1)),
        output(1, scores(MAX_UNREAD_LOGPROBS // 4, 1)),
        output(1, scores(MAX_UNREAD_LOGPROBS // 4, 0), scores(MAX_UNREAD_LOGPROBS // 8, 1)),
    ],
)
async def test_stream_with_too_many_unread_logprobs_is_closed(large: RequestOutput) -> None:
    outgoing = stream()
    outgoing.put(large)
    outgoing.put(large)
    assert not outgoing.closed
    assert await outgoing.next_outputs() == [large]
    outgoing.put(large)
    assert not outgoing.closed
    outgoing.put(output(2, scores(1, 0)))
    assert outgoing.closed
    with pytest.raises(Overloaded):
        await outgoing.next_outputs()


def message_with(**fields: Any) -> pb.WorkerMessage:
    """Return a message of three outputs: two valid ones, and between them one with ``fields``."""
    sound = common.RequestOutput(request_id="s", epoch=1, token_ids=[7])
    spoiled = common.RequestOutput(request_id="r", epoch=1, token_ids=[7], **fields)
    return pb.WorkerMessage(outputs=[sound, spoiled, sound])


ENTRY = common.TokenLogprob(token_id=1, logprob=-1.0)
LONG = common.TokenLogprob(top_token_ids=[1] * 21, top_logprobs=[0.0] * 21)


@pytest.mark.parametrize(
    "message",
    [
        message_with(logprobs=[ENTRY] * 2),
        message_with(logprobs=[LONG]),
        message_with(logprobs=[common.TokenLogprob(top_token_ids=[1])]),
        message_with(prompt_logprobs=[LONG] * (MAX_PROMPT_LOGPROBS // 22 + 1)),
        message_with(details={str(number): "" for number in range(65)}),
    ],
)
def test_excessive_output_fails_only_its_request(message: pb.WorkerMessage) -> None:
    one, spoiled, other = outputs_from_proto(message)
    assert one == other == RequestOutput(RequestId("s"), Epoch(1), 0, (TokenId(7),))
    assert (spoiled.request_id, spoiled.finish_reason) == ("r", FinishReason.ERROR)
    assert spoiled.details == {"error_status": "DATA_LOSS"}


def test_message_with_too_many_outputs_is_rejected() -> None:
    message = pb.WorkerMessage(outputs=[common.RequestOutput()] * (MAX_OUTPUTS + 1))
    with pytest.raises(Invalid):
        outputs_from_proto(message)
