"""Where a request goes: the question, the answer, and who may be asked."""

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
    """``num_tokens`` are prompt and emitted tokens, ``block_keys`` those of their full blocks.
    ``excluded`` are workers that failed this request before. Those of one ``session`` are read at
    one place where nothing else decides. ``trace`` names the question's span,
    and is empty where none is wanted."""

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
        """Raises Overloaded when no worker can take it now, Unavailable when there is none."""
        ...


class FallbackPlacer:
    """Asks one placer after the other; Unavailable means that the next one is asked."""

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
