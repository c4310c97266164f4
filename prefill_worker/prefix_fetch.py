"""The state of one request's prefix fetch from the KV store."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.ids import BlockKey, RequestId
from baton.core.member import Member
from baton.engine.kv_window import KvWindow
from baton.worker.prefix_fetch_stats import PrefixFetchStats


@dataclass(slots=True)
class PrefixFetch:
    """A prompt's prefix that is fetched from the store node ``node``, which has the first
    ``num_stored_blocks`` of the blocks ``keys``. ``split_range`` is the
    half-open range of block indices in ``keys`` that is fetched while the prompt is prefilled.
    ``window`` is that of the request's block table; None: the model's."""

    request_id: RequestId
    node: Member | None = None
    keys: Sequence[BlockKey] = ()
    num_stored_blocks: int = 0
    is_fetched: bool = False
    split_range: tuple[int, int] | None = None
    window: KvWindow | None = None
    stats: PrefixFetchStats = field(default_factory=PrefixFetchStats)
