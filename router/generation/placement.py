"""The interface of placers, which decide which workers serve a request."""

from collections.abc import Sequence
from typing import Protocol

import structlog

from baton.core.placement import Placement, PlacementQuery
from baton.errors import Unavailable

log = structlog.get_logger(__name__)


class Placer(Protocol):
    async def place(self, query: PlacementQuery) -> Placement:
        """Return a placement. Raises Overloaded if no worker can take the request now, Unavailable
        if there is no worker, Invalid if the request is too large for every worker."""
        ...


class FallbackPlacer:
    """Queries several placers in order. A placer is queried only if the previous one raised
    Unavailable; other errors are raised at once."""

    def __init__(self, placers: Sequence[Placer]) -> None:
        assert placers
        self._placers = placers

    async def place(self, query: PlacementQuery) -> Placement:
        failure: Unavailable | None = None
        for placer in self._placers:
            try:
                return await placer.place(query)
            except Unavailable as error:
                log.debug("placer_unavailable", placer=type(placer).__name__, error=str(error))
                failure = error
        assert failure is not None
        raise failure
