"""Tests that the conductor chooses codecs for KV transfers from what workers announce."""

from dataclasses import replace

from baton.core.ids import Epoch, RequestId, TenantId
from baton.core.kv_codec import CodecSpeed, KvCodecName, KvCodecs
from baton.core.member import Member
from baton.core.placement import Placement, PlacementQuery
from baton.core.states import Role
from baton.rpc.convert.placement import placement_query_from_proto, placement_query_to_proto
from tests.unit.conductor.test_conductor import (
    ConductorHarness,
    decode_member,
    member,
    prefill_member,
)

NONE, LOSSLESS, FP8, INT4, _ = KvCodecName
SPEEDS = tuple(CodecSpeed(codec, 0.5, 1e9, 2e9) for codec in (LOSSLESS, FP8, INT4))


def with_codecs(worker: Member, codecs: KvCodecs, host: str = "", *transports: str) -> Member:
    return replace(
        worker,
        kv_codecs=codecs,
        codec_speeds=SPEEDS,
        host=host,
        transports=transports,
        kv_bytes_per_token=10**6,
    )


def place(cluster: ConductorHarness, name: str = "r", *, exact_kv: bool = False) -> Placement:
    query = PlacementQuery(
        RequestId(name), Epoch(1), TenantId(""), 64, 16, (), frozenset(), model="",
        exact_kv=exact_kv,
    )  # fmt: skip
    assert placement_query_from_proto(placement_query_to_proto(query)) == query
    return cluster.conductor.place(query)


async def test_views_have_the_codecs_that_the_workers_are_configured_for() -> None:
    cluster = ConductorHarness()
    await cluster.announce(
        with_codecs(prefill_member("p"), KvCodecs(INT4, FP8), "h", "shm", "grpc"),
        with_codecs(decode_member("d"), KvCodecs(INT4, LOSSLESS, INT4), "h", "grpc"),
    )
    snapshot = cluster.conductor.snapshot()
    lossless, fp8, int4 = SPEEDS
    encoder, decoder = snapshot.prefills["p"], snapshot.decodes["d"]
    assert encoder.wire_codecs == decoder.wire_codecs == (lossless, int4)
    assert (encoder.store_codec, decoder.store_codec) == (fp8, lossless)
    assert (encoder.host, decoder.host) == ("h", "")


async def test_codecs_of_mixed_workers_are_known_and_speeds_follow_reports() -> None:
    cluster = ConductorHarness()
    worker = with_codecs(member("m", Role.MIXED), KvCodecs(store=INT4))
    await cluster.announce(worker, member("kv", Role.KVSTORE))
    view = cluster.conductor.snapshot().mixed["m"]
    assert view.prefill.store_codec == view.decode.store_codec == SPEEDS[2]
    assert view.prefill.wire_codecs == ()
    smaller = replace(SPEEDS[2], ratio=0.25)
    await cluster.announce(replace(worker, codec_speeds=(smaller,)))
    assert cluster.conductor.snapshot().mixed["m"].prefill.store_codec == smaller


async def test_placement_names_the_codec_and_the_alternatives() -> None:
    cluster = ConductorHarness()
    await cluster.announce(
        with_codecs(prefill_member("p"), KvCodecs(INT4), "h", "shm"),
        with_codecs(decode_member("d", link_bytes_per_second=1e6), KvCodecs(INT4), "i", "shm"),
    )
    placed = place(cluster)
    assert placed.prefill is not None and placed.kv_codec in (LOSSLESS, INT4)
    assert placed.kv_codec is placed.codec_alternatives[0].codec
    assert {each.codec for each in placed.codec_alternatives} == {NONE, LOSSLESS, INT4}
    assert "KV travels in" in placed.reason
    exact = place(cluster, "exact", exact_kv=True)
    assert exact.kv_codec is LOSSLESS
    assert {each.codec for each in exact.codec_alternatives} == {NONE, LOSSLESS}


async def test_kv_within_a_host_travels_raw() -> None:
    cluster = ConductorHarness()
    await cluster.announce(
        with_codecs(prefill_member("p"), KvCodecs(INT4), "h", "shm", "grpc"),
        with_codecs(decode_member("d", link_bytes_per_second=1e6), KvCodecs(INT4), "h", "shm"),
    )
    placed = place(cluster)
    assert (placed.kv_codec, placed.codec_alternatives) == (NONE, ())
    assert placed.prefill is not None


async def test_workers_with_another_lossy_codec_get_no_requests() -> None:
    cluster = ConductorHarness()
    old = with_codecs(prefill_member("p0"), KvCodecs(INT4))
    await cluster.announce(
        old, prefill_member("p1"), with_codecs(decode_member("d"), KvCodecs(INT4))
    )
    placements = [place(cluster, str(number)) for number in range(9)]
    assert {placed.prefill and placed.prefill.id for placed in placements} == {"p0"}


async def test_the_choice_follows_the_ratio_that_a_worker_reports() -> None:
    cluster = ConductorHarness()
    prefill = with_codecs(prefill_member("p"), KvCodecs(LOSSLESS))
    decode = with_codecs(decode_member("d", link_bytes_per_second=1e7), KvCodecs(LOSSLESS))
    await cluster.announce(prefill, decode)
    assert place(cluster, "before").kv_codec is LOSSLESS
    useless = replace(SPEEDS[0], ratio=1.0)
    await cluster.announce(replace(prefill, codec_speeds=(useless,)), decode)
    assert place(cluster, "after").kv_codec is NONE
