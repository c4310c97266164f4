"""Lets go of peers that have left the cluster: a mapped pool is memory until its last user ends."""

from collections.abc import Collection, Iterable
from typing import Protocol

import structlog

from baton.clock import Clock
from baton.concurrency.threads import run_in_thread
from baton.core.member import Member
from baton.transport.base import Peer, Transport

SWEEP_SECONDS = 5.0

GRACE_SECONDS = 60.0
"""From the first look at which a peer is missing. Longer than any read may take, and longer than a
registry that has forgotten everybody needs to know them again."""

PeerName = tuple[str, int]
"""A peer's owner and generation."""

log = structlog.get_logger(__name__)


class MemberView(Protocol):
    """Who is in the cluster: :class:`baton.registry.membership.Membership`."""

    @property
    def fresh_at(self) -> float: ...

    @property
    def members(self) -> Collection[Member]: ...


class StalePeerSweeper:
    """Disconnects every peer whose life has been missing from the registry for ``GRACE_SECONDS``.

    A peer from which a read is under way stays until the read has ended, and a registry that
    doesn't answer says nothing about anybody."""

    def __init__(self, transports: Iterable[Transport], members: MemberView, clock: Clock) -> None:
        self._transports = list(transports)
        self._members = members
        self._clock = clock
        self._missing_since: dict[PeerName, float] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            await run_in_thread(self.sweep)

    def sweep(self) -> None:
        """Looks once. May wait for a transport, so it is called off the event loop."""
        now = self._clock.monotonic()
        if now - self._members.fresh_at > SWEEP_SECONDS:
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
