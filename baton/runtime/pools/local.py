"""Workers as processes of the supervisor, on its own machine."""

from collections.abc import Awaitable, Callable

from baton.clock import Clock
from baton.core.states import Role
from baton.rpc.worker_client import convert_worker
from baton.runtime.child import Child
from baton.runtime.pools.kept import Keeper, KeptPools, OnChange
from baton.runtime.recipe import Recipe

TellRole = Callable[[str, Role], Awaitable[None]]
"""Tells the worker at an address its role. Raises BatonError."""


class LocalPools(KeptPools):
    can_convert = True

    def __init__(
        self,
        recipe: Recipe,
        clock: Clock,
        drain_seconds: float,
        hung_seconds: float,
        tell_role: TellRole = convert_worker,
    ) -> None:
        super().__init__()
        self._tell = tell_role
        self._recipe = recipe
        self._clock = clock
        self._drain_seconds = drain_seconds
        self._hung_seconds = hung_seconds

    def _keeper(self, role: Role, on_change: OnChange) -> Keeper:
        spec = self._recipe.worker(role)
        return Child(spec, self._clock, on_change, self._drain_seconds, self._hung_seconds)

    def _change_role(self, keeper: Keeper, role: Role) -> None:
        assert isinstance(keeper, Child)
        keeper.change_role(self._recipe.in_role(keeper.spec, role))

    async def _convert(self, keeper: Keeper) -> None:
        await self._tell(keeper.state.address, Role(keeper.state.role))
