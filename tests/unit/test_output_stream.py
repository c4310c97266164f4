"""Tests the stream of a worker's outputs to a router, and how outputs are split into messages."""

from typing import Any

import pytest

from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import MAX_PROMPT_LOGPROBS, FinishReason, RequestOutput, TokenLogprob
from baton.errors import Invalid, Overloaded
from baton.rpc.convert.outputs import MAX_OUTPUTS, outputs_from_proto
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import worker_pb2 as pb
from baton.worker.output_stream import MAX_UNREAD_PROMPT_LOGPROBS, OutputStream


def stream() -> OutputStream:
    return OutputStream(lambda *_: None, lambda *_: None, lambda _: None)


def output(number: int, num_scores: int = 0, num_top: int = 0) -> RequestOutput:
    top = tuple((TokenId(n), -1.0) for n in range(num_top))
    scores = (TokenLogprob(TokenId(1), -1.0, top),) * num_scores
    request_id = RequestId(str(number))
    return RequestOutput(request_id, Epoch(1), 0, (TokenId(1),), prompt_logprobs=scores)


async def test_all_pending_outputs_are_sent_together() -> None:
    outgoing, outputs = stream(), [output(number) for number in range(5)]
    for each in outputs:
        outgoing.put(each)
    assert await outgoing.next_outputs() == outputs


async def test_outputs_with_prompt_logprobs_are_spread_over_messages() -> None:
    outgoing = stream()
    large = MAX_PROMPT_LOGPROBS // 3
    for number, (num_scores, num_top) in enumerate(
        [(0, 0), (large, 2), (10, 0), (0, 0), (large, 2)]
    ):
        outgoing.put(output(number, num_scores, num_top))
    messages = [[each.request_id for each in await outgoing.next_outputs()] for _ in range(3)]
    assert messages == [["0", "1"], ["2", "3"], ["4"]]


async def test_stream_with_too_many_unread_prompt_logprobs_is_closed() -> None:
    outgoing, count = stream(), MAX_PROMPT_LOGPROBS
    for number in range(MAX_UNREAD_PROMPT_LOGPROBS // count):
        outgoing.put(output(number, count))
    assert not outgoing.closed
    await outgoing.next_outputs()
    outgoing.put(output(100, count))
    assert not outgoing.closed
    outgoing.put(output(101, count))
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
