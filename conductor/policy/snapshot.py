"""What a decision is made from, and the decision."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.core.ids import BlockKey, RequestId, WorkerId
from baton.core.member import Member
from baton.core.store import StoreHint


@dataclass(frozen=True, slots=True)
class Query:
    """``num_tokens`` are prompt and emitted tokens, ``keys`` those of their full blocks."""

    request_id: RequestId
    num_tokens: int
    max_new_tokens: int
    keys: tuple[BlockKey, ...]
    excluded: frozenset[WorkerId] = frozenset()
    model_digest: str = ""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as it is believed to be: its report, and what was sent to it since."""

    member: Member
    sent_requests: int = 0
    sent_tokens: int = 0

    @property
    def id(self) -> WorkerId:
        return self.member.id

    @property
    def num_requests(self) -> int:
        return self.member.load.running + self.member.load.waiting + self.sent_requests

    @property
    def queued_tokens(self) -> int:
        return self.member.load.queued_tokens + self.sent_tokens

    def free_blocks_after(self, num_tokens: int) -> int:
        """Blocks left once ``num_tokens`` more, and all that was sent, have theirs."""
        block_tokens = max(self.member.block_tokens, 1)
        return self.member.load.free_blocks - -(-(num_tokens + self.sent_tokens) // block_tokens)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """READY workers of both pools. ``cached_blocks(worker, keys)`` estimates how many of the
    leading blocks it has; ``share(key)`` is the key's share of recent requests, 0 to 1;
    ``stored(keys)`` names the store node with most of the leading blocks."""

    prefills: tuple[WorkerView, ...]
    decodes: tuple[WorkerView, ...]
    cached_blocks: Callable[[WorkerId, tuple[BlockKey, ...]], int]
    share: Callable[[BlockKey], float]
    stored: Callable[[tuple[BlockKey, ...]], StoreHint | None] = lambda keys: None


@dataclass(frozen=True, slots=True)
class Scored:
    """Why a candidate was taken or not: lower is better."""

    worker: WorkerId
    score: float
    cached_blocks: int
    queued_tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Without ``prefill``, ``decode`` does the whole request. ``store_hint`` is for whoever
    computes the prompt."""

    prefill: Member | None
    decode: Member
    reason: str
    prefill_scores: tuple[Scored, ...] = ()
    decode_scores: tuple[Scored, ...] = ()
    store_hint: StoreHint | None = None
