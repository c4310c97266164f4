"""Disconnects peers that have left the cluster. Otherwise the memory of a dead peer's KV pool would
stay allocated for as long as this process has it mapped."""

from collections.abc import Collection, Iterable
from typing import Protocol

import structlog

from baton.clock import Clock
from baton.concurrency.threads import run_in_thread
from baton.core.member import Member
from baton.transport.base import Peer, Transport

SWEEP_SECONDS = 5.0

GRACE_SECONDS = 60.0
"""How long a peer must be missing before it is disconnected. This is longer than any read may take,
and longer than members need to announce themselves again to a registry that has lost its data."""

PeerName = tuple[str, int]
"""A peer's owner and generation."""

log = structlog.get_logger(__name__)


class MemberView(Protocol):
    """The members of the cluster, as :class:`baton.registry.membership.Membership` provides
    them."""

    @property
    def last_answer_seconds(self) -> float: ...

    @property
    def members(self) -> Collection[Member]: ...


class StalePeerSweeper:
    """Disconnects every peer whose generation has been missing from the registry for
    ``GRACE_SECONDS``.

    A peer with unfinished reads stays until they have ended. While the registry doesn't answer, no
    peer counts as missing."""

    def __init__(self, transports: Iterable[Transport], members: MemberView, clock: Clock) -> None:
        self._transports = list(transports)
        self._members = members
        self._clock = clock
        self._missing_since: dict[PeerName, float] = {}

    async def run(self) -> None:
        """Disconnect stale peers every ``SWEEP_SECONDS``, until cancelled."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            await run_in_thread(self.sweep)

    def sweep(self) -> None:
        """Disconnect the peers that are stale now. This may wait for a transport's lock, so it must
        not run in the event loop."""
        now = self._clock.monotonic()
        if now - self._members.last_answer_seconds > SWEEP_SECONDS:
            self._missing_since.clear()
            return
        present = {(str(member.id), int(member.generation)) for member in self._members.members}
        known = {name for transport in self._transports for name in _idle_peers(transport)}
        self._missing_since = {name: self._missing_since.get(name, now) for name in known - present}
        for name, since in list(self._missing_since.items()):
            if now - since >= GRACE_SECONDS:
                self._disconnect(name)

    def _disconnect(self, name: PeerName) -> None:
        for transport in self._transports:
            peer = _idle_peers(transport).get(name)
            if peer is not None:
                transport.disconnect(peer)
                log.info("peer_left", transport=transport.name, owner=name[0], generation=name[1])
        del self._missing_since[name]


def _idle_peers(transport: Transport) -> dict[PeerName, Peer]:
    peers = transport.idle_peers()
    return {(peer.endpoint.owner, peer.endpoint.generation): peer for peer in peers}
