"""The state of one request's KV import."""

from dataclasses import dataclass, field

from baton.core.kv_codec import KvCodecName
from baton.engine.engine import Reservation
from baton.transport.base import Transfer
from baton.worker.block_reader import BlockSource
from baton.worker.kv_transfer_stats import KvTransferStats


@dataclass(slots=True)
class KvImport:
    """The state of one request's import. ``num_read_blocks`` blocks of the reservation have been
    read or were cached. ``unfinished_transfers`` are the transfers that could not be stopped; until
    they have ended, the reservation's blocks must be quarantined. ``accepted_codecs`` are those
    that the source may use."""

    reservation: Reservation | None = None
    source: BlockSource | None = None
    num_read_blocks: int = 0
    unfinished_transfers: tuple[Transfer, ...] = ()
    accepted_codecs: tuple[KvCodecName, ...] = ()
    stats: KvTransferStats = field(default_factory=KvTransferStats)
