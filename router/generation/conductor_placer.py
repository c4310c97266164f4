"""Placement by the conductors in the registry."""

import hashlib
from collections.abc import Sequence

from baton.clock import Clock
from baton.core.credentials import ClusterCredentials, to_credentials
from baton.core.member import Member
from baton.core.placement import Placement, PlacementQuery
from baton.core.states import Role
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    Invalid,
    Overloaded,
    Unavailable,
    Unresponsive,
)
from baton.rpc.conductor_client import request_placement
from baton.rpc.framed.calls import CallClient
from baton.rpc.service import CONDUCTOR
from router.generation.cluster import Cluster
from router.limits import MAX_CONDUCTOR_CHANNELS

CONDUCTOR_TIMEOUT_SECONDS = 2.0
"""The timeout of a query. A placement takes microseconds to compute, so a conductor that takes
longer than this has failed."""

COOLDOWN_SECONDS = 2.0
"""A conductor that timed out is not queried for this long, so that requests don't wait for it one
after the other."""


class ConductorPlacer:
    """Queries the ready conductors in turn until one answers. A hash of the request id determines
    which conductor is queried first; this spreads the load and sends a request's retries to the
    same conductor.

    All queries to a conductor share one framed connection.
    """

    def __init__(
        self, cluster: Cluster, clock: Clock, credentials: ClusterCredentials | str | None
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._credentials = to_credentials(credentials)
        self._conductors: dict[str, CallClient] = {}  # by framed address
        self._failed_at: dict[str, float] = {}

    async def place(self, query: PlacementQuery) -> Placement:
        """Return a conductor's placement. Conductors that recently did not answer in time are
        skipped. Raises Overloaded or Invalid if a conductor answers with that error, and
        Unavailable if no conductor returns a placement."""
        failure = "no conductor is ready"
        for conductor in _rotated_by_hash(
            self._cluster.ready_members(Role.CONDUCTOR), query.request_id
        ):
            if self._is_cooling_down(conductor.address):
                failure = f"{conductor.id}: it recently did not answer in time"
                continue
            try:
                client = self._client(conductor.framed_address)
                return await request_placement(client, query, CONDUCTOR_TIMEOUT_SECONDS)
            except (Overloaded, Invalid):
                raise
            except BatonError as error:
                failure = f"{conductor.id}: {error}"
                if isinstance(error, DeadlineExceeded | Unresponsive):
                    self._failed_at[conductor.address] = self._clock.monotonic()
        raise Unavailable(failure)

    def close(self) -> None:
        for client in self._conductors.values():
            client.close()
        self._conductors.clear()

    def _is_cooling_down(self, address: str) -> bool:
        failed_at = self._failed_at.get(address)
        return failed_at is not None and self._clock.monotonic() < failed_at + COOLDOWN_SECONDS

    def _client(self, address: str) -> CallClient:
        client = self._conductors.get(address)
        if client is None:
            if len(self._conductors) >= MAX_CONDUCTOR_CHANNELS:
                self._conductors.pop(next(iter(self._conductors))).close()
            client = self._conductors[address] = CallClient(address, CONDUCTOR, self._credentials)
        return client


def _rotated_by_hash(conductors: Sequence[Member], request_id: str) -> Sequence[Member]:
    if len(conductors) < 2:
        return conductors
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "big") % len(conductors)
    return [*conductors[start:], *conductors[:start]]
