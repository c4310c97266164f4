"""Tests the conversion between dataclasses and protobuf messages."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from baton.core.adapter import AdapterRef
from baton.core.attention_window import MAX_WINDOW_TOKENS, AttentionWindow
from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import BlockKey, Epoch, RequestId, TokenId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from baton.core.priority import Priority
from baton.core.request import RequestOutput, RequestSpec, SamplingParams, TokenLogprob
from baton.core.store import RAW_ONLY, LeaseRequest
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
    block_run_from_proto,
    block_run_to_proto,
    filter_from_proto,
    lease_query_from_proto,
    lease_query_to_proto,
    put_from_proto,
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


def test_attention_window_of_a_request_round_trips() -> None:
    spec = replace(SPEC, attention_window=AttentionWindow(0, MAX_WINDOW_TOKENS))
    assert spec_from_proto(spec_to_proto(spec)) == spec


@pytest.mark.parametrize(
    "window", [AttentionWindow(4, 0), AttentionWindow(MAX_WINDOW_TOKENS + 1, 1)]
)
def test_invalid_attention_window_is_rejected(window: AttentionWindow) -> None:
    with pytest.raises(Invalid, match="recent_tokens at least 1"):
        spec_from_proto(spec_to_proto(replace(SPEC, attention_window=window)))


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


def run_of(*blocks: tuple[int, str]) -> tuple[BlockRef, ...]:
    """Return blocks with the given sizes and codecs."""
    return tuple(
        BlockRef(1000 * n, size, n, BlockKey(bytes([n]) * 16), KvCodecName(codec))
        for n, (size, codec) in enumerate(blocks)
    )


@pytest.mark.parametrize(
    ("blocks", "num_sizes", "codecs", "indexes"),
    [
        ((), 0, [], b""),
        (((64, "none"), (64, "none")), 0, [], b""),
        (((16, "int4"), (16, "int4")), 0, ["int4"], b""),
        (((16, "int4"), (64, "none"), (20, "lossless")), 3, ["int4", "lossless", ""], b"\0\2\1"),
        (((64, "none"), (32, "none")), 2, [], b""),
    ],
)
def test_runs_of_blocks_have_only_the_columns_that_they_need(
    blocks: tuple[tuple[int, str], ...], num_sizes: int, codecs: list[str], indexes: bytes
) -> None:
    run = run_of(*blocks)
    message = block_run_to_proto(run, "xxh3")
    assert (len(message.sizes), list(message.codecs)) == (num_sizes, codecs)
    assert message.codec_indexes == indexes
    assert block_run_from_proto(message) == run


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"sizes": [5]}, "2 blocks must have a size above 0 for each block"),
        ({"sizes": [5, 0]}, "2 blocks must have a size above 0 for each block"),
        ({"size_bytes": 0, "codecs": ["int4"]}, "must have a size above 0 for each block"),
        ({"codecs": ["zip"]}, "kv codec 'zip' is unknown; known are none, lossless"),
        ({"codecs": ["int4"], "codec_indexes": b"\0"}, "an index below 1, the number of"),
        ({"codecs": ["int4"], "codec_indexes": b"\0\1"}, "an index below 1, the number of"),
        ({"codecs": ["int4"] * 17}, "may name 16 codecs, not 17"),
    ],
)
def test_invalid_runs_of_blocks_are_rejected(change: dict[str, Any], error: str) -> None:
    message = block_run_to_proto(run_of((64, "none"), (64, "none")), "xxh3")
    for name, value in change.items():
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    with pytest.raises(Invalid, match=error):
        block_run_from_proto(message)


def test_lease_names_the_codecs_that_the_reader_decodes() -> None:
    query = LeaseRequest((BlockKey(bytes(16)),), 2.0, 5, RAW_ONLY | {KvCodecName.INT4})
    message = lease_query_to_proto(query)
    assert list(message.codecs) == ["int4"]
    message.codecs.append("of a newer version")
    assert lease_query_from_proto(message) == query
    assert lease_query_from_proto(kvstore_pb2.LeaseRequest()).codecs == RAW_ONLY


def test_layout_of_a_put_is_bounded() -> None:
    message = kvstore_pb2.PutRequest(head=bytes(16), layout="a" * 129)
    with pytest.raises(Invalid, match="layout must have at most 128 characters, not 129"):
        put_from_proto(message)


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "soon", "1e9", "", float("inf"), -0.5])
def test_absurd_retry_after_values_become_one_second(value: str | float) -> None:
    assert parse_retry_after(value) == 1.0


def test_valid_retry_after_is_kept() -> None:
    assert parse_retry_after("2.500") == parse_retry_after(2.5) == 2.5
