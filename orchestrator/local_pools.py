"""Workers as processes of the supervisor, on its own machine."""

from collections.abc import Awaitable, Callable

from baton.clock import Clock
from baton.core.states import Role
from baton.rpc.worker_client import convert_worker
from orchestrator.child_process import ChildProcess
from orchestrator.launch_specs import LaunchSpecs
from orchestrator.supervised_pools import OnChange, SupervisedPools, SupervisedProcess

ConvertWorker = Callable[[str, Role], Awaitable[None]]
"""Tells the worker at an address its role. Raises BatonError."""


class LocalPools(SupervisedPools):
    can_convert = True

    def __init__(
        self,
        recipe: LaunchSpecs,
        clock: Clock,
        drain_seconds: float,
        hung_seconds: float,
        tell_role: ConvertWorker = convert_worker,
    ) -> None:
        super().__init__()
        self._tell = tell_role
        self._recipe = recipe
        self._clock = clock
        self._drain_seconds = drain_seconds
        self._hung_seconds = hung_seconds

    def _keeper(self, role: Role, on_change: OnChange) -> SupervisedProcess:
        spec = self._recipe.worker(role)
        return ChildProcess(spec, self._clock, on_change, self._drain_seconds, self._hung_seconds)

    def _change_role(self, keeper: SupervisedProcess, role: Role) -> None:
        assert isinstance(keeper, ChildProcess)
        keeper.change_role(self._recipe.in_role(keeper.spec, role))

    async def _convert(self, keeper: SupervisedProcess) -> None:
        await self._tell(keeper.state.address, Role(keeper.state.role))
