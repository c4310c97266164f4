"""Deciding which workers serve a request: the query, its result, and the interface of placers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from baton.core.ids import BlockKey, Epoch, RequestId, TenantId, WorkerId
from baton.core.placement import Placement
from baton.errors import Unavailable

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """Asks for a placement. ``num_tokens`` counts prompt and emitted tokens, ``block_keys`` are the
    keys of their full blocks. ``excluded`` are workers that failed this request before. Requests of
    one ``session`` are prefilled on the same worker if neither cached prefixes nor load decide.
    ``trace`` is the traceparent of the query's span, empty if the request is not traced."""

    request_id: RequestId
    epoch: Epoch
    tenant: TenantId
    num_tokens: int
    max_new_tokens: int
    block_keys: tuple[BlockKey, ...] = field(repr=False)
    excluded: frozenset[WorkerId]
    model: str
    trace: str = ""
    session: str = ""


class Placer(Protocol):
    async def place(self, query: PlacementQuery) -> Placement:
        """Return a placement. Raises Overloaded when no worker can take the request now,
        Unavailable when there is no worker."""
        ...


class FallbackPlacer:
    """Queries its placers in order: the next one only if the one before raises Unavailable."""

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
