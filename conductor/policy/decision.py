"""A placement decision: the chosen workers, the reason, and the scored alternatives."""

from dataclasses import dataclass

from baton.core.ids import WorkerId
from baton.core.kv_codec import KvCodecName
from baton.core.placement import ScoredCodec, ScoredWorker
from conductor.policy.snapshot import StoredPrefix


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision where to run a request. If ``prefill`` is None, ``decode`` serves the whole
    request. If both are the same prefill worker, that worker does. ``fetch_source`` is the store
    node to fetch the prefix from; ``service_seconds`` is the predicted prefill time;
    ``ttft_seconds`` and ``itl_seconds`` are predictions. Times are 0 if they were not predicted.
    The scores are those of all candidates of each kind of worker, whether one of them was chosen or
    not. ``codec_scores`` are those of the codecs for the KV transfer, the chosen one first; they
    are empty if there is no transfer, or only raw KV can be transferred."""

    prefill: WorkerId | None
    decode: WorkerId
    reason: str
    fetch_source: StoredPrefix | None = None
    service_seconds: float = 0.0
    ttft_seconds: float = 0.0
    itl_seconds: float = 0.0
    prefill_scores: tuple[ScoredWorker, ...] = ()
    decode_scores: tuple[ScoredWorker, ...] = ()
    mixed_scores: tuple[ScoredWorker, ...] = ()
    codec_scores: tuple[ScoredCodec, ...] = ()

    @property
    def kv_codec(self) -> KvCodecName:
        """The codec for the KV transfer."""
        return self.codec_scores[0].codec if self.codec_scores else KvCodecName.NONE
