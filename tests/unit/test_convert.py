"""Tests the conversion between dataclasses and protobuf messages."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from baton.core.adapter import AdapterRef
from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.priority import Priority
from baton.core.request import RequestOutput, RequestSpec, SamplingParams, TokenLogprob
from baton.errors import Invalid
from baton.rpc.convert.common import (
    block_from_proto,
    grammar_from_proto,
    output_from_proto,
    output_to_proto,
    spec_from_proto,
    spec_to_proto,
)
from baton.rpc.convert.error import parse_retry_after
from baton.rpc.convert.kv_transfer import transfer_event_from_proto
from baton.rpc.convert.kvstore import (
    filter_from_proto,
    stored_from_proto,
    watch_event_from_proto,
)
from baton.rpc.v1 import common_pb2, kvstore_pb2, worker_pb2

GRAMMAR = Grammar(GrammarKind.REGEX, "a+")

SPEC = RequestSpec(
    RequestId("r"),
    Epoch(2),
    (TokenId(5), TokenId(6)),
    1,
    SamplingParams(max_tokens=3),
    tenant_salt=b"salt",
    ttft_slo_seconds=2.5,
    tenant=b"tag",
    priority=Priority.BATCH,
    weight=2.5,
    trace="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
)


def test_request_spec_round_trips() -> None:
    assert spec_from_proto(spec_to_proto(SPEC)) == SPEC
    without = replace(SPEC, ttft_slo_seconds=0.0, trace="")
    assert spec_from_proto(spec_to_proto(without)) == without


def test_adapter_of_a_request_round_trips() -> None:
    spec = replace(SPEC, adapter=AdapterRef("acme/sql:v1", bytes(range(16))))
    assert spec_from_proto(spec_to_proto(spec)) == spec


@pytest.mark.parametrize("adapter", [AdapterRef("", bytes(16)), AdapterRef("a", bytes(15))])
def test_invalid_adapter_is_rejected(adapter: AdapterRef) -> None:
    with pytest.raises(Invalid, match="a valid name and a digest of 16 bytes"):
        spec_from_proto(spec_to_proto(replace(SPEC, adapter=adapter)))


@pytest.mark.parametrize("seconds", [-0.1, float("inf"), float("nan")])
def test_invalid_ttft_slo_is_rejected(seconds: float) -> None:
    with pytest.raises(Invalid, match="ttft_slo_seconds must be finite and at least 0") as refusal:
        spec_from_proto(spec_to_proto(replace(SPEC, ttft_slo_seconds=seconds)))
    assert refusal.value.param == "ttft_slo_seconds"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [({"tenant": b"t" * 17}, "tenant"), ({"priority": 3}, "priority"), ({"weight": -1}, "weight")],
)
def test_invalid_tenant_priority_or_weight_is_rejected(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(Invalid) as refusal:
        spec_from_proto(spec_to_proto(replace(SPEC, **wrong)))
    assert refusal.value.param == param


@pytest.mark.parametrize("kind", GrammarKind)
def test_grammar_round_trips(kind: GrammarKind) -> None:
    sampling = SamplingParams(max_tokens=3, grammar=Grammar(kind, "text"), prompt_logprobs=0,
                              min_tokens=2)  # fmt: skip
    spec = replace(SPEC, sampling=sampling)
    assert spec_from_proto(spec_to_proto(spec)) == spec


def test_unknown_grammar_kind_is_rejected() -> None:
    message = spec_to_proto(replace(SPEC, sampling=SamplingParams(3, grammar=GRAMMAR)))
    message.sampling.grammar.kind = 99  # type: ignore[assignment]
    with pytest.raises(Invalid, match="unknown kind of grammar 99"):
        spec_from_proto(message)


def test_prompt_logprobs_round_trip() -> None:
    entries = (TokenLogprob(TokenId(6), -0.5, ((TokenId(7), -0.25),)), TokenLogprob(TokenId(8), -1))
    output = RequestOutput(RequestId("r"), Epoch(1), 0, (TokenId(9),), prompt_logprobs=entries)
    assert output_from_proto(output_to_proto(output)) == output


def make_output(**fields: Any) -> common_pb2.RequestOutput:
    return common_pb2.RequestOutput(request_id="r", epoch=2, token_ids=[5], **fields)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (make_output(finish_reason=99), "unknown finish reason 99: the worker has another version"),
        (
            make_output(
                logprobs=[common_pb2.TokenLogprob(top_token_ids=[1, 2], top_logprobs=[-0.1])]
            ),
            "top_token_ids and top_logprobs must have the same length",
        ),
    ],
)
def test_invalid_output_is_rejected(message: common_pb2.RequestOutput, why: str) -> None:
    """The error is ``Invalid``, so that only this request fails: see
    :mod:`baton.rpc.convert.outputs`."""
    with pytest.raises(Invalid, match=why):
        output_from_proto(message)


def test_unknown_enum_values_reject_only_their_message() -> None:
    """Each message has one invalid field: an enum value or event that is unknown or missing, a
    block key of the wrong length, or NaN as a time."""
    odd: list[tuple[Callable[[Any], Any], Any]] = [
        (grammar_from_proto, common_pb2.Grammar(kind=99, text="a")),  # type: ignore[arg-type]
        (stored_from_proto, kvstore_pb2.StoredBlock(key=bytes(16), tier=99)),  # type: ignore[arg-type]
        (watch_event_from_proto, kvstore_pb2.WatchEvent(tier=99)),  # type: ignore[arg-type]
        (transfer_event_from_proto, worker_pb2.PullEvent()),
        (stored_from_proto, kvstore_pb2.StoredBlock(key=b"short", tier=1)),  # type: ignore[arg-type]
        (block_from_proto, common_pb2.BlockRef(key=b"short")),
        (filter_from_proto, kvstore_pb2.BlockFilter(stored_before=float("nan"))),
    ]
    for read, message in odd:
        with pytest.raises(Invalid):
            read(message)


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "soon", "1e9", "", float("inf"), -0.5])
def test_absurd_retry_after_values_become_one_second(value: str | float) -> None:
    assert parse_retry_after(value) == 1.0


def test_valid_retry_after_is_kept() -> None:
    assert parse_retry_after("2.500") == parse_retry_after(2.5) == 2.5
