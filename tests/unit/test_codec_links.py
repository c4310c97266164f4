"""Tests the parts of the codec benchmark that decide: its choices, and how it divides its time."""

import asyncio

import pytest

from baton.core.cost import PrefillCost
from baton.core.kv_codec import CodecSpeed, KvCodecName
from baton.kv_codec.block_format import parse_layout
from benchmarks.codec_handoff import RATIOS, parse
from benchmarks.codec_links.choice import choose_codec, choose_reload
from benchmarks.codec_links.kv_pool import (
    FORMAT,
    KV_BYTES_PER_TOKEN,
    LAYOUT_NAME,
    block_of_key,
    prefix_keys,
)
from benchmarks.codec_links.recompute import extrapolate, h100_cost
from benchmarks.codec_links.rounds import run_rounds, shares
from prefill_worker.reload_policy import ReloadMode

NONE, LOSSLESS, FP8, INT4, _ = KvCodecName
TOKENS = 4096
RAW_BYTES = TOKENS * KV_BYTES_PER_TOKEN
SPEEDS = (
    CodecSpeed(LOSSLESS, 0.7, 5e9, 10e9),
    CodecSpeed(FP8, 0.5, 4e9, 8e9),
    CodecSpeed(INT4, 0.28, 1e9, 3e9),
)


def test_pool_has_the_layout_that_it_announces() -> None:
    assert parse_layout(LAYOUT_NAME) == FORMAT
    assert [block_of_key(key) for key in prefix_keys(300)] == [*range(300)]


@pytest.mark.parametrize(
    ("wire", "codec", "of_best", "allowed"),
    [
        (LOSSLESS, LOSSLESS, 1.0, {NONE, LOSSLESS}),
        (FP8, FP8, 1.0, {NONE, LOSSLESS, FP8}),
        (INT4, INT4, 2.5 / 2.0, {NONE, LOSSLESS, INT4}),
    ],
)
def test_conductor_chooses_among_the_codecs_of_a_setting(
    wire: KvCodecName, codec: KvCodecName, of_best: float, allowed: set[KvCodecName]
) -> None:
    """On 0.1 GB/s the smallest is predicted to be the fastest. If int4 was slower than lossless,
    the choice was wrong, and that is told."""
    measured = {NONE: 6.0, LOSSLESS: 2.0, FP8: 1.0, INT4: 2.5}
    choice = choose_codec(TOKENS, 0.1e9, SPEEDS, SPEEDS, wire, measured)
    assert (choice.codec, choice.of_best) == (codec, of_best)
    assert {*choice.predicted_seconds} == allowed
    assert choice.predicted_seconds[NONE] == pytest.approx(0.0005 + RAW_BYTES / 0.1e9)


@pytest.mark.parametrize(
    ("per_token_seconds", "conductor", "mode", "of_best"),
    [
        (10 / TOKENS, ReloadMode.FETCH, ReloadMode.FETCH, 1.0),
        (0.1 / TOKENS, ReloadMode.RECOMPUTE, ReloadMode.RECOMPUTE, 1.0),
        (1.0 / TOKENS, ReloadMode.FETCH, ReloadMode.SPLIT, 0.5),
    ],
)
def test_prefix_is_fetched_if_computing_takes_longer(
    per_token_seconds: float, conductor: ReloadMode, mode: ReloadMode, of_best: float
) -> None:
    """The fetch takes a second; a split of two equal times takes half of either."""
    cost = PrefillCost(0.0, per_token_seconds, 0.0)
    choice = choose_reload(TOKENS, RAW_BYTES / 0.9, None, cost, 1.0, 1.0)
    assert (choice.conductor, choice.mode) == (conductor, mode)
    assert choice.of_best == pytest.approx(of_best)


def test_cost_of_a_whole_model_is_extrapolated() -> None:
    """10 layers, each with 1 us per token and 1 ns per pair, of which one was measured."""
    empty = 512 * 1e-6 + 512 * 256 * 1e-9
    cached = empty + 512 * 2048 * 1e-9
    cost = extrapolate(empty, cached, 512, 2048, 10.0)
    assert (cost.per_token_seconds, cost.per_pair_seconds) == pytest.approx((1e-5, 1e-8))
    assert cost.seconds(512) == pytest.approx(10 * empty)


def test_cost_on_an_h100_is_that_of_the_measured_profile() -> None:
    assert h100_cost().seconds(4096) == pytest.approx(0.1024, rel=0.05)
    assert h100_cost().seconds(32768) == pytest.approx(1.4878, rel=0.05)


class SlowLinks:
    """Measurements of a link take its bytes divided by its speed, in virtual time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.measured: list[float] = []

    async def measure(self, link: float) -> None:
        self.measured.append(link)
        self.seconds += 10.0 / link

    def run(self, rounds: int, repeat_until: float, end: float) -> list[float]:
        return asyncio.run(
            run_rounds(
                (0.1, 1.0, 10.0), rounds, self.measure, lambda link: 10.0 / link, repeat_until, end,
                lambda: self.seconds,
            )
        )  # fmt: skip


@pytest.mark.parametrize(
    ("rounds", "repeat_until", "end", "measured", "missing"),
    [
        (1, 0.0, 1000.0, [0.1, 1.0, 10.0], []),
        (2, 1000.0, 1000.0, [0.1, 1.0, 10.0, 0.1, 1.0, 10.0], []),
        (3, 125.0, 1000.0, [0.1, 1.0, 10.0, 1.0, 10.0, 10.0], []),
        (2, 50.0, 50.0, [1.0, 10.0, 1.0, 10.0], [0.1]),
    ],
)
def test_rounds_are_repeated_while_there_is_time(
    rounds: int,
    repeat_until: float,
    end: float,
    measured: list[float],
    missing: list[float],
) -> None:
    links = SlowLinks()
    assert links.run(rounds, repeat_until, end) == missing
    assert links.measured == measured


def test_time_is_divided_by_weights() -> None:
    assert shares([2, 1, 1], 100.0, 180.0) == 140.0


def test_default_run_covers_the_table_within_twelve_minutes() -> None:
    options = parse([])
    assert options.tokens == [4096, 32768] and options.links == [0.1, 1.0, 10.0]
    assert options.codecs == [NONE, LOSSLESS, FP8, INT4]
    assert options.limit_seconds < 720
    assert {*RATIOS} == {*KvCodecName}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "100"], "--tokens must be multiples of 16"),
        (["--links", "0"], "--links must be positive"),
        (["--codecs", "none,int4"], "--codecs must include none and lossless"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err
