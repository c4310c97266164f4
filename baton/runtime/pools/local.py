"""Workers as processes of the supervisor, on its own machine."""

from baton.clock import Clock
from baton.core.states import Role
from baton.runtime.child import Child
from baton.runtime.pools.kept import Keeper, KeptPools, OnChange
from baton.runtime.recipe import Recipe


class LocalPools(KeptPools):
    def __init__(
        self, recipe: Recipe, clock: Clock, drain_seconds: float, hung_seconds: float
    ) -> None:
        super().__init__()
        self._recipe = recipe
        self._clock = clock
        self._drain_seconds = drain_seconds
        self._hung_seconds = hung_seconds

    def _keeper(self, role: Role, on_change: OnChange) -> Keeper:
        spec = self._recipe.worker(role)
        return Child(spec, self._clock, on_change, self._drain_seconds, self._hung_seconds)
