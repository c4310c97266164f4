"""Tests the predicted times of KV transfers, and the choice of the codec."""

from dataclasses import replace

import pytest

from baton.core.cost import PrefillCost
from baton.core.ids import WorkerId
from baton.core.kv_codec import CodecSpeed, KvCodecName
from baton.core.placement import ScoredCodec
from conductor.policy.decision import Decision
from conductor.policy.kv_transfer_time import (
    CHUNK_BYTES,
    RAW,
    fetch_seconds,
    pipeline_seconds,
    transfer_seconds,
    wire_codecs,
    with_codec,
)
from conductor.policy.policies import get_policy
from conductor.policy.snapshot import LinkSpeed, Snapshot, StoredPrefix
from tests.cluster_snapshots import FakeCache, decode, prefill, query, snapshot

NONE, LOSSLESS, FP8, INT4, _ = KvCodecName
LOSSLESS_SPEED = CodecSpeed(LOSSLESS, 0.7, 3e9, 4e9)
INT4_SPEED = CodecSpeed(INT4, 0.28, 2e9, 3e9)
CODECS = (LOSSLESS_SPEED, INT4_SPEED)
GB = 10**9
SIZE_TOKENS = 1000
"""Tokens whose KV has 1 GB, in the snapshots below."""


def cluster(gigabytes_per_second: float, cache: FakeCache | None = None, **hosts: str) -> Snapshot:
    """A cluster of one prefill and one decode worker, with codecs, and 1 MB of KV per token."""
    found = snapshot(
        [prefill("p", wire_codecs=CODECS, host=hosts.get("p", "one"))],
        [decode("d", wire_codecs=CODECS, host=hosts.get("d", "two"))],
        cache,
    )
    link = LinkSpeed(gigabytes_per_second * GB, 50e9)
    return replace(found, link=link, kv_bytes_per_token=10**6)


def decision(compute_seconds: float = 0.0) -> Decision:
    return Decision(WorkerId("p"), WorkerId("d"), "chosen", service_seconds=compute_seconds)


@pytest.mark.parametrize(
    ("gigabytes_per_second", "none", "lossless", "int4", "best", "best_exact"),
    [
        (0.1, 10.0005, 7.0075904, 2.8138818, INT4, LOSSLESS),
        (1, 1.0005, 0.7075904, 0.5061628, INT4, LOSSLESS),
        (10, 0.1005, 0.3380347, 0.5060994, NONE, NONE),
    ],
)
def test_codec_with_the_earliest_decode_start_is_chosen(
    gigabytes_per_second: float,
    none: float,
    lossless: float,
    int4: float,
    best: KvCodecName,
    best_exact: KvCodecName,
) -> None:
    """1 GB of KV that is computed already. On a link of 10 GB/s, int4 is bounded by its
    encoder."""
    found = cluster(gigabytes_per_second)
    any_kv = with_codec(found, query(num_tokens=SIZE_TOKENS), decision())
    scored = {each.codec: each.decode_start_seconds for each in any_kv.codec_scores}
    expected = {NONE: none, LOSSLESS: lossless, INT4: int4}
    assert scored == pytest.approx(expected, abs=1e-7)
    assert (any_kv.kv_codec, any_kv.codec_scores[0].codec) == (best, best)
    starts = [each.decode_start_seconds for each in any_kv.codec_scores]
    assert starts == sorted(starts)
    exact = with_codec(found, query(num_tokens=SIZE_TOKENS, exact_kv=True), decision())
    assert {each.codec for each in exact.codec_scores} == {NONE, LOSSLESS}
    assert exact.kv_codec is best_exact


def test_transfer_behind_a_long_prefill_stays_raw() -> None:
    """The prefill takes 2 s, so that the KV of all but the last chunk has travelled before its end,
    in any codec. The last chunk travels fastest raw."""
    chosen = with_codec(cluster(10), query(num_tokens=SIZE_TOKENS), decision(2.0))
    assert [each.codec for each in chosen.codec_scores] == [NONE, LOSSLESS, INT4]
    starts = [each.decode_start_seconds for each in chosen.codec_scores]
    assert starts == pytest.approx([2.0021777, 2.0102937, 2.0144881], abs=1e-7)
    assert chosen.reason == (
        "chosen; KV travels raw, so decoding can start 2.002 s after the prefill begins "
        "(in lossless: 2.010 s, in int4: 2.014 s)"
    )


def test_less_lossy_codec_wins_among_equals() -> None:
    found = cluster(10, FakeCache({"d": 8}))
    chosen = with_codec(found, query(num_tokens=128), decision(2.0))
    assert chosen.codec_scores == tuple(
        ScoredCodec(codec, 2.0005) for codec in (NONE, LOSSLESS, INT4)
    )


def test_only_missing_blocks_are_transferred() -> None:
    found = cluster(0.1, FakeCache({"d": 4}))
    chosen = with_codec(found, query(num_tokens=164), decision())
    raw = next(each for each in chosen.codec_scores if each.codec is NONE)
    assert raw.decode_start_seconds == pytest.approx(0.0005 + (164 - 64) / 100)


def test_raw_pipeline_takes_as_long_as_the_link() -> None:
    link = LinkSpeed(3e9, 5e9)
    for size in (0, 7, 1000, CHUNK_BYTES, 123 * CHUNK_BYTES):
        assert pipeline_seconds(link, size, RAW) == link.seconds(size)


def test_only_what_is_read_last_is_decoded_while_nothing_is_read() -> None:
    """A chunk has 16 MiB; in half of its size it is read in two parts. Reading a part takes 4 s
    and decoding it 2 s; encoding the first chunk takes 1 s."""
    mib = float(2**20)
    codec = CodecSpeed(FP8, 0.5, 16 * mib, 4 * mib)
    link = LinkSpeed(mib, mib, 0.0)
    for num_chunks in (1, 5):
        seconds = pipeline_seconds(link, num_chunks * CHUNK_BYTES, codec)
        assert seconds == pytest.approx(1 + num_chunks * (4 + 4) + 2)


def test_small_transfer_passes_one_stage_after_the_other() -> None:
    link = LinkSpeed(1e6, 1e6, 0.0)
    codec = CodecSpeed(INT4, 0.25, 2e6, 4e6)
    assert pipeline_seconds(link, 1e6, codec, 1.0) == pytest.approx(1.0 + 0.5 + 0.25 + 0.25)


# -- which codecs are allowed -------------------------------------------------------------------


def test_codec_must_be_known_to_both_workers() -> None:
    encoder = prefill("p", wire_codecs=CODECS)
    decoder = decode("d", wire_codecs=(CodecSpeed(INT4, 0.5, 1.0, 7e9),))
    expected = [replace(INT4_SPEED, decode_bytes_per_second=7e9)]
    assert wire_codecs(encoder, decoder, exact_kv=False) == expected
    assert wire_codecs(encoder, decoder, exact_kv=True) == []
    assert wire_codecs(encoder, decode("d"), exact_kv=False) == []
    assert wire_codecs(prefill("p"), decoder, exact_kv=False) == []


def test_kv_stays_raw_within_a_host() -> None:
    found = cluster(0.1, p="one", d="one")
    unchanged = decision()
    assert with_codec(found, query(), unchanged) is unchanged
    elsewhere = cluster(0.1, p="", d="")
    assert with_codec(elsewhere, query(), unchanged).kv_codec is INT4


def test_decision_without_transfer_is_unchanged() -> None:
    local = replace(decision(), prefill=None)
    assert with_codec(cluster(0.1), query(), local) is local
    assert local.kv_codec is NONE


# -- what else depends on it --------------------------------------------------------------------


def test_time_of_a_transfer_is_that_of_the_fastest_codec() -> None:
    found = cluster(0.1)
    encoder, decoder = found.prefills["p"], found.decodes["d"]
    asked, exact = query(), query(exact_kv=True)
    assert transfer_seconds(found, asked, encoder, decoder, GB) == pytest.approx(2.8138818)
    assert transfer_seconds(found, exact, encoder, decoder, GB) == pytest.approx(7.0075904)
    assert transfer_seconds(found, asked, encoder, decode("x"), GB) == found.link.seconds(GB)


def test_fetch_takes_the_time_of_the_stored_bytes() -> None:
    found = cluster(0.1)
    plain, encoded = prefill("p"), prefill("p", store_codec=INT4_SPEED)
    assert fetch_seconds(found.link, query(), plain, GB) == found.link.seconds(GB)
    assert fetch_seconds(found.link, query(), encoded, GB) == pytest.approx(2.8054932)
    assert fetch_seconds(found.link, query(exact_kv=True), encoded, GB) == found.link.seconds(GB)
    lossless = prefill("p", store_codec=LOSSLESS_SPEED)
    assert fetch_seconds(found.link, query(exact_kv=True), lossless, GB) == pytest.approx(7.0019981)


def test_encoded_prefix_is_fetched_where_a_raw_one_would_be_recomputed() -> None:
    """Fetching 128 tokens takes 1.28 s raw, and 0.36 s in int4; computing them takes 0.64 s."""
    cost = PrefillCost(0.0, 0.005, 0.0)
    cache = FakeCache(stored_prefix=StoredPrefix("s", 8))
    for codec, fetched in ((None, 0), (INT4_SPEED, 8)):
        worker = replace(prefill("p", store_codec=codec), cost=cost)
        found = replace(snapshot([worker], [decode("d")], cache), link=LinkSpeed(1e5, 1e5, 0.0))
        assert get_policy("baton")(found, query()).prefill_scores[0].fetched_blocks == fetched
