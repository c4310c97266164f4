"""What a worker has to say to a router, cut into messages."""

import pytest

from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import MAX_PROMPT_LOGPROBS, RequestOutput, TokenLogprob
from baton.errors import Overloaded
from baton.worker.stream import MAX_UNREAD_SCORES, OutputStream


def stream() -> OutputStream:
    return OutputStream(lambda *_: None, lambda *_: None, lambda _: None)


def output(number: int, num_scores: int = 0, num_top: int = 0) -> RequestOutput:
    top = tuple((TokenId(n), -1.0) for n in range(num_top))
    scores = (TokenLogprob(TokenId(1), -1.0, top),) * num_scores
    request_id = RequestId(str(number))
    return RequestOutput(request_id, Epoch(1), 0, (TokenId(1),), prompt_logprobs=scores)


async def test_all_that_is_there_goes_at_once() -> None:
    outgoing, outputs = stream(), [output(number) for number in range(5)]
    for each in outputs:
        outgoing.put(each)
    assert await outgoing.outputs() == outputs


async def test_scored_prompts_are_spread_over_messages() -> None:
    outgoing = stream()
    large = MAX_PROMPT_LOGPROBS // 3
    for number, (num_scores, num_top) in enumerate(
        [(0, 0), (large, 2), (10, 0), (0, 0), (large, 2)]
    ):
        outgoing.put(output(number, num_scores, num_top))
    messages = [[each.request_id for each in await outgoing.outputs()] for _ in range(3)]
    assert messages == [["0", "1"], ["2", "3"], ["4"]]


async def test_a_router_that_does_not_read_scores_is_closed() -> None:
    outgoing, count = stream(), MAX_PROMPT_LOGPROBS
    for number in range(MAX_UNREAD_SCORES // count):
        outgoing.put(output(number, count))
    assert not outgoing.closed
    await outgoing.outputs()
    outgoing.put(output(100, count))
    assert not outgoing.closed
    outgoing.put(output(101, count))
    assert outgoing.closed
    with pytest.raises(Overloaded):
        await outgoing.outputs()
