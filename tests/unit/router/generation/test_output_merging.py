"""Tests that waiting outputs are coalesced, and how the outputs of two workers are merged."""

from dataclasses import replace

import pytest

from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import (
    FinishReason,
    RequestOutput,
)
from baton.errors import Corrupt
from router.generation.output_merger import OutputMerger, coalesce_outputs
from router.limits import MAX_EARLY_OUTPUTS


def out(first: int, *tokens: int, epoch: int = 1, end: bool = False) -> RequestOutput:
    reason = FinishReason.LENGTH if end else None
    ids = tuple(TokenId(token) for token in tokens)
    return RequestOutput(RequestId("r"), Epoch(epoch), first, ids, finish_reason=reason)


def merged(outputs: list[RequestOutput], *, base: int = 0, handed_over: bool = True) -> list[int]:
    merge = OutputMerger(Epoch(1), base, is_split=handed_over)
    return [t for output in outputs for o in merge.add(output) for t in o.token_ids]


def test_waiting_outputs_are_coalesced() -> None:
    one = RequestOutput(RequestId("r"), Epoch(1), 0, (TokenId(7),), details={"transport": "shm"})
    two = RequestOutput(RequestId("r"), Epoch(1), 1, (TokenId(8),))
    details = {"kv_transfer_bytes": "1"}
    reported = RequestOutput(RequestId("r"), Epoch(1), 2, (TokenId(9),), details=details)
    last = RequestOutput(
        RequestId("r"), Epoch(1), 3, (TokenId(5),), finish_reason=FinishReason.STOP, cached_tokens=4
    )
    first, second = coalesce_outputs([one, two, reported, last])
    assert first == replace(one, token_ids=(7, 8))
    whole = replace(reported, token_ids=(9, 5), finish_reason=FinishReason.STOP, cached_tokens=4)
    assert second == whole


def test_merger_orders_trims_and_drops_outputs() -> None:
    assert merged([out(1, 11), out(2, 12, 13), out(0, 10), out(4, 14)]) == [10, 11, 12, 13, 14]
    assert merged([out(0, 10), out(0, 10, 11), out(1, 11, 12)]) == [10, 11, 12]
    assert merged([out(0, 10, epoch=2), out(0, 20)]) == [20]
    assert merged([out(5, 15), out(6, 16)], base=5) == [15, 16]


def test_merger_passes_a_final_output_without_tokens() -> None:
    merge = OutputMerger(Epoch(1), 0, is_split=False)
    assert len(list(merge.add(out(0, 10)))) == 1
    assert [o.finish_reason for o in merge.add(out(1, end=True))] == [FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("outputs", "handed_over"),
    [
        ([out(1, 11)], False),
        ([out(2, 12)], True),
        ([out(1, 11), out(3, 13)], True),
        ([out(0, 10), out(2, 12)], True),
    ],
)
def test_merger_detects_gaps(outputs: list[RequestOutput], handed_over: bool) -> None:
    with pytest.raises(Corrupt, match="missing"):
        merged(outputs, handed_over=handed_over)


def test_merger_bounds_the_outputs_before_the_first_token() -> None:
    merger = OutputMerger(Epoch(1), 0, is_split=True)
    for number in range(MAX_EARLY_OUTPUTS):
        assert list(merger.add(out(1 + number, 7))) == []
    with pytest.raises(Corrupt, match="is missing"):
        list(merger.add(out(1 + MAX_EARLY_OUTPUTS, 7)))
