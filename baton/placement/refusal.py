"""The error of a request that a conductor refuses because of the load."""

from baton.core.placement import Placement
from baton.errors import Overloaded


class PlacementRefused(Overloaded):
    """A conductor refuses a request now. ``placement`` is the one that the request would have
    got."""

    def __init__(self, error: Overloaded, placement: Placement) -> None:
        super().__init__(str(error), retry_after_seconds=error.retry_after_seconds)
        self.placement = placement
