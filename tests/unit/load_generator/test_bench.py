"""Tests the parts of ``baton bench``: the load, its prompts, and the figures that it computes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from baton.errors import Invalid
from baton.traces.synthetic import TRACE_GENERATORS
from baton.traces.trace import Trace, TraceRequest
from load_generator import run as load_run
from load_generator.load_spec import LoadSpec, RequestLengths, group_by_session, plain_trace
from load_generator.multiprocess import split_load
from load_generator.prompts import PromptText, TokenCalibration, token_ids
from load_generator.record import LatencyHistogram, RequestRecord, make_record
from load_generator.request import BenchRequest
from load_generator.result import GeneratorUsage, LatencyTargets, summarize
from load_generator.server_probe import fit_to_context
from load_generator.table import warnings
from load_generator.target import parse_target

LENGTHS = RequestLengths(
    input_tokens=100, output_tokens=4, input_spread=0.0, output_spread=0.0, shared_tokens=0
)


def load(**fields: Any) -> LoadSpec:
    given = {
        "trace": None, "kind": None, "lengths": LENGTHS, "requests": None, "duration": None,
        "rate": None, "concurrency": None, "burstiness": 1.0, "rate_factor": 1.0,
        "jitter_seconds": 0.0, "think_seconds": 0.0, "warm_up": None, "seed": 0,
    }  # fmt: skip
    return LoadSpec(**{**given, **fields})


# -- the load --------------------------------------------------------------------------------


def test_plain_load_has_the_requested_lengths_rate_and_sharing() -> None:
    even = plain_trace(LENGTHS, 5, 4.0, 0.0, 1)
    assert [arrival.arrival_seconds for arrival in even.requests] == [0, 0.25, 0.5, 0.75, 1.0]
    assert {arrival.num_prompt_tokens for arrival in even.requests} == {100}
    blocks = [block for arrival in even.requests for block in arrival.block_ids]
    assert len(set(blocks)) == len(blocks) == 10
    spread = replace(LENGTHS, input_spread=0.5, shared_tokens=64)
    many = plain_trace(spread, 2000, 10.0, 2.0, 1)
    assert many == plain_trace(spread, 2000, 10.0, 2.0, 1)
    assert {arrival.block_ids[0] for arrival in many.requests if len(arrival.block_ids) > 1} == {0}
    mean = sum(arrival.num_prompt_tokens for arrival in many.requests) / 2000
    assert 95 < mean < 105
    assert 150 < many.requests[-1].arrival_seconds < 260


def test_load_is_limited_by_duration_or_by_requests() -> None:
    cut = load(rate=50.0, duration=2.0).make_trace().requests
    assert 60 < len(cut) < 140 and cut[-1].arrival_seconds < 2
    assert load(rate=50.0, duration=2.0).warm_up_seconds == 0.2
    assert load(rate=50.0, requests=30).warm_up_requests(30) == 3
    assert load(rate=50.0, requests=30, warm_up=1.0).warm_up_requests(30) == 0
    assert len(load(concurrency=3).make_trace().requests) == 100
    twice = load(rate=1.0, rate_factor=4.0, requests=3, burstiness=0.0).make_trace()
    assert [arrival.arrival_seconds for arrival in twice.requests] == [0, 0.25, 0.5]
    assert load(concurrency=3, kind="chat", requests=20).make_trace().block_tokens == 64


def test_conversations_keep_their_order() -> None:
    trace = TRACE_GENERATORS["chat"](60, 8.0, 3)
    whole = group_by_session(trace.requests)
    assert sum(map(len, whole)) == 60
    assert all(len({turn.session for turn in session}) == 1 for session in whole)
    assert len(group_by_session(plain_trace(LENGTHS, 7, 1.0, 1.0, 0).requests)) == 7


def test_split_load_keeps_every_request() -> None:
    whole = load(concurrency=5, kind="chat", requests=60)
    trace = whole.make_trace()
    parts = split_load(whole, trace, 3)
    assert [part.concurrency for part, _ in parts] == [2, 2, 1]
    split = [arrival for _, part in parts for arrival in part.requests]
    assert sorted(split, key=lambda each: each.arrival_seconds) == list(trace.requests)
    opened = load(rate=5.0, requests=9)
    parts = split_load(opened, opened.make_trace(), 2)
    assert [len(part.requests) for _, part in parts] == [5, 4]
    with pytest.raises(Invalid, match=r"at most --concurrency \(5\)"):
        split_load(whole, trace, 6)


def test_requests_beyond_the_context_are_shortened() -> None:
    trace = Trace(
        "t", 64, (TraceRequest(0, 900, 50, tuple(range(15))), TraceRequest(1, 10, 5, (99,)))
    )
    assert fit_to_context(trace, None, True) == (trace, 0)
    cut, count = fit_to_context(trace, 500, True)
    assert (count, cut.requests[1]) == (1, trace.requests[1])
    assert cut.requests[0] == TraceRequest(0, 450, 50, tuple(range(8)))


# -- prompts ---------------------------------------------------------------------------------


def test_prompts_with_common_blocks_share_their_prefix() -> None:
    text = PromptText("s", TokenCalibration())
    one, other = TraceRequest(0, 200, 1, (1, 2, 3, 4)), TraceRequest(0, 130, 1, (1, 2, 9))
    first, second = text.make_prompt(one, 64).split(), text.make_prompt(other, 64).split()
    assert (len(first), len(second)) == (200, 130)
    assert first[:128] == second[:128] and first[128] != second[128]
    assert text.make_prompt(one, 64, repetition=1).split()[0] != first[0]
    assert PromptText("t", TokenCalibration()).make_prompt(one, 64).split()[0] != first[0]
    halved = PromptText("s", TokenCalibration(tokens_per_word=2.0, overhead_tokens=20.0))
    assert len(halved.make_prompt(one, 64).split()) == 90
    assert len(text.make_prompt(TraceRequest(0, 40_000, 1, (1, 2)), 20_000).split()) == 40_000


def test_prompts_of_token_ids_have_exact_lengths() -> None:
    one, other = TraceRequest(0, 200, 1, (1, 2, 3, 4)), TraceRequest(0, 130, 1, (1, 2, 9))
    first, second = token_ids(one, 64, 7), token_ids(other, 64, 7)
    assert (len(first), len(second)) == (200, 130)
    assert first[:128] == second[:128] and first[128:132] != second[128:]
    assert token_ids(one, 64, 8)[:4] != first[:4]
    assert all(300 <= token < 1324 for token in first)


# -- responses -------------------------------------------------------------------------------


def call(status: int = 200) -> BenchRequest:
    request = BenchRequest(TraceRequest(0, 10, 4, (1,)), True, 1.0, lambda _: None, sent_at=1.5)
    request.status = status
    return request


def event(**fields: Any) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def chunk(text: str, reason: str | None = None) -> bytes:
    return event(choices=[{"delta": {"content": text}, "finish_reason": reason}])


def test_stream_is_timed_from_its_scheduled_start() -> None:
    usage = {"prompt_tokens": 12, "completion_tokens": 3,
             "prompt_tokens_details": {"cached_tokens": 8}}  # fmt: skip
    request = call()
    request.feed(chunk("") + chunk("a"), 2.0)
    data = chunk("b") + chunk("c", "stop") + event(choices=[], usage=usage)
    request.feed(data[:30], 2.25)
    request.feed(data[30:] + b": comment\r\ndata: [DONE]\n\n", 2.5)
    request.complete(3.0)
    record = make_record(request, 1.0)
    assert record == RequestRecord(0.0, 0.5, 2.0, 1.0, 0.25, 12, 3, 8, 200, None, "")
    assert request.inter_token_seconds == [0.5, 0.0]


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        (chunk("a"), "connection lost", "without a finish_reason"),
        (event(error={"code": "unavailable", "message": "died"}), "unavailable", "died"),
        (event(error="what"), "", "what"),
        (b"data: {nonsense\n\n", "malformed", "not an event of OpenAI's API"),
        (b"data: 17\n\n", "malformed", "not an event of OpenAI's API"),
        (event(choices=[7]), "malformed", "not an event of OpenAI's API"),
    ],
)
def test_failed_streams_are_recorded_with_code_and_message(
    data: bytes, code: str, message: str
) -> None:
    request = call()
    request.feed(data, 2.0)
    request.complete(3.0)
    assert request.error is not None
    assert (request.error.code, request.error.status) == (code, 200)
    assert message in request.error.message


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        (b'{"error": {"message": "m", "type": "t", "code": null}}', "t", "m"),
        (b'{"message": "m", "code": 40001}', "40001", "m"),
        (b'{"error": "plain"}', "", "plain"),
        (b"<html>no</html>", "", "<html>no</html>"),
    ],
)
def test_error_bodies_of_all_forms_are_understood(data: bytes, code: str, message: str) -> None:
    request = call(503)
    request.feed(data[:5], 2.0)
    request.feed(data[5:], 2.0)
    request.complete(3.0)
    assert request.error is not None
    assert (request.error.status, request.error.code, request.error.message) == (503, code, message)


def test_reasoning_and_tool_calls_are_tokens() -> None:
    request = call()
    request.feed(event(choices=[{"delta": {"reasoning_content": "hm"}}]), 2.0)
    request.feed(
        event(choices=[{"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": "x"}]), 3.0
    )
    request.complete(3.0)
    assert (
        request.first_token_at,
        request.inter_token_seconds,
        make_record(request, 1.0).answer_tokens,
    ) == (2.0, [1.0], 2)


# -- figures ---------------------------------------------------------------------------------


def test_latency_histogram_is_accurate_to_half_a_percent() -> None:
    gaps = LatencyHistogram()
    gaps.add(number / 1000 for number in range(1, 1001))
    gaps.add([0.0, 1e9])
    for percent, seconds in ((1, 0.01), (50, 0.5), (99, 0.99)):
        assert gaps.percentile(percent) == pytest.approx(seconds, rel=0.006)
    again = LatencyHistogram(list(gaps.counts))
    again.merge(gaps)
    assert len(again) == 2 * len(gaps) == 2004
    assert (
        LatencyHistogram([0] * 3).counts[0] == 0 and LatencyHistogram().sample_percentiles(5) == []
    )


def record(ttft: float | None = 0.1, **fields: Any) -> RequestRecord:
    base = RequestRecord(0.0, 0.001, 1.0, ttft, 0.02, 100, 10, 20, 200, None, "")
    return replace(base, **fields)


def test_summary_counts_goodput_attainment_and_errors() -> None:
    records = [
        *(record(prompt_tokens=length) for length in (10, 20, 30)),
        record(0.9, prompt_tokens=40),
        *(record(tbt_seconds=0.2, prompt_tokens=length) for length in (50, 60)),
        record(None, status=429, code="rate_limit", message="later", prompt_tokens=70),
        record(None, status=0, code="timeout", message="slow", prompt_tokens=80),
    ]
    effort = GeneratorUsage(0.4, 10.0, 1, 10, 3)
    found = summarize(records, LatencyHistogram(), 2.0, LatencyTargets(0.5, 0.05), effort)
    assert (found.num_requests, found.completed, found.throughput_rps) == (8, 6, 3.0)
    assert (found.attainment, found.goodput_rps) == (3 / 8, 1.5)
    assert found.attainment_by_length_quartile == [1.0, 0.5, 0.0, 0.0]
    assert (found.rejected_ratio, found.failed_ratio) == (1 / 8, 2 / 8)
    assert found.hit_ratio_tokens == 120 / 210
    assert [error["code"] for error in found.errors] == ["rate_limit", "timeout"]
    assert found.itl_seconds["p50"] is None and found.kept_up
    assert (found.cpu_share, found.cpu_seconds_per_request) == (0.04, 0.04)


def test_overloaded_load_generator_is_reported() -> None:
    late = [record(lag_seconds=0.2)] * 10
    found = summarize(
        late, LatencyHistogram(), 1.0, LatencyTargets(None, None), GeneratorUsage(1, 10, 1, 10, 3)
    )
    assert not found.kept_up and "sent 200 ms late (p99), although" in warnings(found)[0]
    busy = summarize(
        [record()],
        LatencyHistogram(),
        1.0,
        LatencyTargets(None, None),
        GeneratorUsage(19, 10, 2, 10, 3),
    )
    assert not busy.kept_up and busy.goodput_rps is None
    assert "95% of a core: use --processes N" in warnings(busy)[0]
    nothing = summarize(
        [], LatencyHistogram(), 0.0, LatencyTargets(1.0, None), GeneratorUsage(0, 0, 1, 0, 0)
    )
    assert nothing.ttft_seconds["p99"] is None and nothing.attainment == 0.0
    assert warnings(nothing) == ["nothing was measured: the load ended during the warm-up"]


def test_plots_get_latencies_and_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check which values are plotted; the plotting itself is tested with the simulator."""
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(load_run, "plot_cdfs", lambda path, lines: drawn.update({path.name: lines}))
    monkeypatch.setattr(load_run, "plot_load", lambda path, lines: drawn.update({path.name: lines}))
    gaps = LatencyHistogram()
    gaps.add([0.02] * 10)
    failed = record(None, code="timeout", scheduled_at=0.5, ended_at=2.5)
    load_run.draw_latencies(
        tmp_path, [record(), record(scheduled_at=2.0, ended_at=2.1), failed], gaps
    )
    ttfts, singles = drawn["latency.png"]["measured"]
    assert ttfts == [0.1, 0.1] and singles[0] == pytest.approx(0.02, rel=0.006)
    assert drawn["time.png"] == {
        "arrived per second": [(0.0, 2.0), (1.0, 0.0), (2.0, 1.0)],
        "answered per second": [(1.0, 1.0), (2.0, 1.0)],
        "failed per second": [(2.0, 1.0)],
    }


def test_target_url_is_parsed() -> None:
    target = parse_target("https://[::1]/openai/v1", "key", None, True)
    assert (target.host, target.port, target.base_path) == ("::1", 443, "/openai")
    assert target.url == "https://[::1]:443/openai"
    head = target.request_head("POST", "/completions").decode()
    assert head.startswith("POST /openai/v1/completions HTTP/1.1\r\nhost: [::1]:443\r\n")
    assert "authorization: Bearer key\r\n" in head and head.endswith("content-length: ")
