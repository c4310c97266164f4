"""Predicts how long KV takes from worker to worker and from store to worker, and chooses the codec
in which it travels.

Blocks are computed, encoded, and read in a pipeline. So the whole takes as long as its slowest
stage, plus the time that the first chunk needs in the other stages. The stage of reading includes
decoding: blocks are decoded while the next ones are read, so only what was read last is decoded
after that. All functions are pure.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from baton.core.kv_codec import CodecSpeed, KvCodecName
from baton.core.placement import ScoredCodec
from conductor.policy.decision import Decision
from conductor.policy.snapshot import DecodeView, LinkSpeed, PolicyQuery, PrefillView, Snapshot

CHUNK_BYTES = 16 * 2**20
"""Size, as in the KV pool, of the blocks that are encoded and announced together
(``baton/worker/block_encoder.py``)."""

READ_BYTES = 4 * 2**20
"""Size, as it travels, of what is read at once (``GROUP_BYTES`` in ``baton/transport/base.py``).
It is decoded while the next read is under way."""

RAW = CodecSpeed(KvCodecName.NONE, 1.0, math.inf, math.inf)
"""The codec NONE."""

_LOSS = {codec: number for number, codec in enumerate(KvCodecName)}


def pipeline_seconds(
    link: LinkSpeed, size_bytes: float, codec: CodecSpeed, compute_seconds: float = 0.0
) -> float:
    """Return the time until the last of ``size_bytes`` of KV, as counted in the KV pool, is
    decoded. It is computed by a prefill that takes ``compute_seconds``; 0 if it exists already."""
    if size_bytes <= 0:
        return link.latency_seconds + compute_seconds
    stages = (
        compute_seconds,
        size_bytes / codec.encode_bytes_per_second,
        _reading_seconds(link, size_bytes, codec),
    )
    slowest = max(stages)
    first_chunk = min(CHUNK_BYTES / size_bytes, 1.0)
    return link.latency_seconds + slowest + first_chunk * (sum(stages) - slowest)


def _reading_seconds(link: LinkSpeed, size_bytes: float, codec: CodecSpeed) -> float:
    """Return the time of transferring and decoding."""
    transfer = size_bytes * codec.ratio / link.bytes_per_second
    decode = size_bytes / codec.decode_bytes_per_second
    last_read = min(READ_BYTES / (size_bytes * codec.ratio), 1.0)
    return max(transfer, decode) + last_read * min(transfer, decode)


def wire_codecs(prefill: PrefillView, decode: DecodeView, *, exact_kv: bool) -> list[CodecSpeed]:
    """Return the codecs in which KV may travel from one worker to the other, without NONE: those
    that both have, at the encoder's and the decoder's speed. There are none within a host, where
    KV is copied through memory."""
    if not prefill.wire_codecs or (prefill.host and prefill.host == decode.host):
        return []
    decoders = {each.codec: each for each in decode.wire_codecs}
    return [
        replace(each, decode_bytes_per_second=decoders[each.codec].decode_bytes_per_second)
        for each in prefill.wire_codecs
        if each.codec in decoders and not (exact_kv and each.codec.is_lossy)
    ]


def transfer_seconds(
    snapshot: Snapshot,
    query: PolicyQuery,
    prefill: PrefillView,
    decode: DecodeView,
    size_bytes: float,
) -> float:
    """Return the time of a KV transfer in the fastest codec that is allowed."""
    raw = snapshot.link.seconds(size_bytes)
    codecs = wire_codecs(prefill, decode, exact_kv=query.exact_kv)
    return min([raw, *(pipeline_seconds(snapshot.link, size_bytes, each) for each in codecs)])


def fetch_seconds(
    link: LinkSpeed, query: PolicyQuery, view: PrefillView, size_bytes: float
) -> float:
    """Return the time in which a worker fetches blocks from a store over ``link``. They are stored
    encoded in the worker's store codec, unless it is lossy and the request wants exact KV."""
    codec = view.store_codec
    if codec is None or (query.exact_kv and codec.codec.is_lossy):
        return link.seconds(size_bytes)
    stored = replace(codec, encode_bytes_per_second=math.inf)
    return pipeline_seconds(link, size_bytes, stored)


def with_codec(snapshot: Snapshot, query: PolicyQuery, decision: Decision) -> Decision:
    """Return the decision with the codecs for its KV transfer, best first: the earlier decoding can
    start, the better; among equals, the one that changes less comes first. Return ``decision``
    itself if there is no transfer, or only raw KV can be transferred."""
    if decision.prefill is None or decision.prefill == decision.decode:
        return decision
    prefill, decode = snapshot.prefills[decision.prefill], snapshot.decodes[decision.decode]
    codecs = wire_codecs(prefill, decode, exact_kv=query.exact_kv)
    if not codecs:
        return decision
    on_device = PrefillView(decode.id, prefill.cost)
    cached = snapshot.cache.num_local_blocks(on_device, query.keys) * snapshot.block_tokens
    size, compute = missing_bytes(snapshot, query, cached), decision.service_seconds
    scores = [
        ScoredCodec(each.codec, pipeline_seconds(snapshot.link, size, each, compute))
        for each in (RAW, *codecs)
    ]
    scores.sort(key=lambda each: (each.decode_start_seconds, _LOSS[each.codec]))
    return replace(decision, reason=decision.reason + _reason(scores), codec_scores=tuple(scores))


def missing_bytes(snapshot: Snapshot, query: PolicyQuery, num_cached_tokens: int) -> int:
    """Return the size of the KV that a decode worker lacks."""
    return max(query.num_tokens - num_cached_tokens, 0) * snapshot.kv_bytes_per_token


def _reason(scores: Sequence[ScoredCodec]) -> str:
    best, *others = scores
    compared = ", ".join(f"{_encoding(each)}: {each.decode_start_seconds:.3f} s" for each in others)
    return (
        f"; KV travels {_encoding(best)}, so decoding can start {best.decode_start_seconds:.3f} s "
        f"after the prefill begins ({compared})"
    )


def _encoding(scored: ScoredCodec) -> str:
    return "raw" if scored.codec is KvCodecName.NONE else f"in {scored.codec}"
