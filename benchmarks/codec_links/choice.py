"""Lets the production policies choose by the workers' measurements, and compares each choice with
the best that was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import WorkerId
from baton.core.kv_codec import CodecSpeed, KvCodecName
from benchmarks.codec_links.kv_pool import BLOCK_TOKENS, KV_BYTES_PER_TOKEN
from conductor.policy.decision import Decision
from conductor.policy.kv_transfer_time import with_codec
from conductor.policy.prefill_work import prefill_work
from conductor.policy.snapshot import (
    AnyBlockKey,
    DecodeView,
    LinkSpeed,
    PolicyQuery,
    PrefillView,
    Snapshot,
    StoredPrefix,
    WorkerPool,
)
from prefill_worker.reload_policy import ReloadMode, choose_reload_mode

CHUNK_BLOCKS = 512 // BLOCK_TOKENS
"""The blocks of a prefill chunk at the default ``max_batched_tokens``."""

UNUSED = PrefillCost(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class CodecChoice:
    """The conductor's choice if ``kv_codec_wire`` is ``wire``: the times that it predicts, and how
    many times as long as the best of the allowed codecs the chosen one took."""

    wire: KvCodecName
    codec: KvCodecName
    predicted_seconds: dict[KvCodecName, float]
    of_best: float


@dataclass(frozen=True)
class ReloadChoice:
    """The choice between fetching and computing a stored prefix. The conductor plans with
    ``conductor``; ``mode`` is the worker's choice, which decides. ``of_best`` is the time of that
    choice, divided by the shorter one of fetching and computing. The time of a split is not
    measured: it is that at which both ends would meet."""

    conductor: ReloadMode
    mode: ReloadMode
    of_best: float


@dataclass
class NoCache:
    """Nothing is cached; ``stored`` is in another host's store."""

    stored: StoredPrefix | None = None
    known: dict[AnyBlockKey, float] = field(default_factory=dict)

    def num_device_blocks(self, worker: WorkerId, keys: Sequence[AnyBlockKey]) -> int:
        return 0

    def num_local_blocks(self, view: PrefillView, keys: Sequence[AnyBlockKey]) -> int:
        return 0

    def workers_with_prefix(self, keys: Sequence[AnyBlockKey], count: int) -> list[WorkerId]:
        return []

    def longest_stored_prefix(self, keys: Sequence[AnyBlockKey]) -> StoredPrefix | None:
        return self.stored

    def request_share(self, key: AnyBlockKey) -> float:
        return self.known.get(key, 0.0)


def choose_codec(
    num_tokens: int,
    link_bytes_per_second: float,
    encoders: Sequence[CodecSpeed],
    decoders: Sequence[CodecSpeed],
    wire: KvCodecName,
    measured_seconds: Mapping[KvCodecName, float],
) -> CodecChoice:
    """Let the conductor choose the codec of a transfer of KV that is computed already. ``encoders``
    and ``decoders`` are what the two workers report of their codecs."""
    allowed = {wire, KvCodecName.LOSSLESS}
    prefill = PrefillView(
        WorkerId("p"), UNUSED, wire_codecs=tuple(s for s in encoders if s.codec in allowed)
    )
    decode = DecodeView(
        WorkerId("d"), DecodeCost(0.0, 0.0, 0.0), 2 * num_tokens,
        wire_codecs=tuple(s for s in decoders if s.codec in allowed),
    )  # fmt: skip
    snapshot = _snapshot(link_bytes_per_second, prefill, decode)
    decision = Decision(prefill.id, decode.id, "the only workers")
    scores = with_codec(snapshot, _query(num_tokens), decision).codec_scores
    chosen = scores[0].codec
    best = min(measured_seconds[each.codec] for each in scores)
    predicted = {each.codec: each.decode_start_seconds for each in scores}
    return CodecChoice(wire, chosen, predicted, measured_seconds[chosen] / best)


def choose_reload(
    num_tokens: int,
    link_bytes_per_second: float,
    store_codec: CodecSpeed | None,
    cost: PrefillCost,
    worker_estimate_seconds: float,
    measured_seconds: float,
) -> ReloadChoice:
    """Let the conductor plan, and a worker choose, whether to fetch a stored prefix of
    ``num_tokens`` tokens or to compute it at ``cost``. A worker estimates the time of the fetch
    from earlier fetches."""
    num_blocks = num_tokens // BLOCK_TOKENS
    stored = StoredPrefix("s", num_blocks)
    prefill = PrefillView(WorkerId("p"), cost, store_codec=store_codec)
    snapshot = _snapshot(link_bytes_per_second, prefill, None, NoCache(stored))
    planned = prefill_work(snapshot, _query(num_tokens + 1), prefill, stored)
    compute = cost.seconds(num_tokens)
    decision = choose_reload_mode(num_blocks, worker_estimate_seconds, compute, CHUNK_BLOCKS)
    times = {
        ReloadMode.FETCH: measured_seconds,
        ReloadMode.RECOMPUTE: compute,
        ReloadMode.SPLIT: 1 / (1 / measured_seconds + 1 / compute),
    }
    conductor = ReloadMode.FETCH if planned.fetched_blocks else ReloadMode.RECOMPUTE
    return ReloadChoice(
        conductor, decision.mode, times[decision.mode] / min(measured_seconds, compute)
    )


def _snapshot(
    link_bytes_per_second: float,
    prefill: PrefillView,
    decode: DecodeView | None,
    cache: NoCache | None = None,
) -> Snapshot:
    link = LinkSpeed(link_bytes_per_second, link_bytes_per_second)
    decodes = WorkerPool([decode] if decode is not None else [])
    return Snapshot(
        0.0, 0, WorkerPool([prefill]), decodes, cache or NoCache(), BLOCK_TOKENS,
        KV_BYTES_PER_TOKEN, link,
    )  # fmt: skip


def _query(num_tokens: int) -> PolicyQuery:
    return PolicyQuery("r", num_tokens, 1, tuple(range(num_tokens // BLOCK_TOKENS)))
