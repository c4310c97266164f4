"""The live conductor: keeps what policies decide from, and asks them."""

from collections import deque
from dataclasses import dataclass

from baton.clock import Clock
from baton.core.ids import Generation, WorkerId
from baton.core.member import Member
from baton.core.states import Role
from baton.registry.membership import Membership
from conductor.mirror import Mirror
from conductor.policy.placement import PlacementConfig, place
from conductor.policy.snapshot import Decision, Query, Snapshot, WorkerView
from conductor.traffic import Heads, Placed

UNREPORTED_SECONDS = 2.0
"""What was sent shows in a worker's own report by then: a sweep, a heartbeat, a poll."""

MAX_UNREPORTED = 65_536


@dataclass(frozen=True, slots=True)
class _Sent:
    at_seconds: float
    worker: WorkerId
    num_tokens: int


class Conductor:
    def __init__(
        self, membership: Membership, mirror: Mirror, clock: Clock, config: PlacementConfig
    ) -> None:
        self._membership = membership
        self._mirror = mirror
        self._clock = clock
        self._config = config
        self._heads = Heads()
        self._placed = Placed()
        self._sent: deque[_Sent] = deque(maxlen=MAX_UNREPORTED)
        self._generations: dict[WorkerId, Generation] = {}

    def place(self, query: Query) -> Decision:
        """Raises Unavailable, Overloaded."""
        decision = place(self.snapshot(), query, self._config)
        self._heads.record(query.keys)
        chosen = decision.prefill or decision.decode
        self._placed.record(chosen.id, query.keys)
        now = self._clock.monotonic()
        for member in {m.id: m for m in (chosen, decision.decode)}.values():
            self._sent.append(_Sent(now, member.id, query.num_tokens))
        return decision

    def snapshot(self) -> Snapshot:
        self._forget_reported()
        self._notice_rebirths()
        return Snapshot(
            self._views(Role.PREFILL),
            self._views(Role.DECODE),
            self._placed.cached_blocks,
            self._heads.share,
            self._mirror.best,
        )

    @property
    def members(self) -> list[Member]:
        return self._membership.members

    def _views(self, role: Role) -> tuple[WorkerView, ...]:
        requests: dict[WorkerId, int] = {}
        tokens: dict[WorkerId, int] = {}
        for sent in self._sent:
            requests[sent.worker] = requests.get(sent.worker, 0) + 1
            tokens[sent.worker] = tokens.get(sent.worker, 0) + sent.num_tokens
        return tuple(
            WorkerView(member, requests.get(member.id, 0), tokens.get(member.id, 0))
            for member in self._membership.ready(role)
        )

    def _forget_reported(self) -> None:
        oldest = self._clock.monotonic() - UNREPORTED_SECONDS
        while self._sent and self._sent[0].at_seconds < oldest:
            self._sent.popleft()

    def _notice_rebirths(self) -> None:
        for member in self._membership.members:
            if self._generations.get(member.id, member.generation) != member.generation:
                self._placed.forget(member.id)
            self._generations[member.id] = member.generation
