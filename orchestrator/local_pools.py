"""Pools of workers that are child processes of the supervisor, on the same machine."""

from collections.abc import Awaitable, Callable

from baton.clock import Clock
from baton.core.states import Role
from baton.rpc.worker_client import convert_worker
from orchestrator.child_process import ChildProcess
from orchestrator.launch_specs import LaunchSpecs
from orchestrator.supervised_pools import OnChange, SupervisedPools, SupervisedProcess

ConvertWorker = Callable[[str, Role], Awaitable[None]]
"""Makes the worker at an address change its role. Raises BatonError."""


class LocalPools(SupervisedPools):
    can_convert = True

    def __init__(
        self,
        launch_specs: LaunchSpecs,
        clock: Clock,
        drain_timeout_seconds: float,
        hang_timeout_seconds: float,
        convert: ConvertWorker = convert_worker,
    ) -> None:
        super().__init__()
        self._convert_worker = convert
        self._launch_specs = launch_specs
        self._clock = clock
        self._drain_timeout_seconds = drain_timeout_seconds
        self._hang_timeout_seconds = hang_timeout_seconds

    def _create_process(self, role: Role, on_change: OnChange) -> SupervisedProcess:
        spec = self._launch_specs.worker(role)
        return ChildProcess(
            spec, self._clock, on_change, self._drain_timeout_seconds, self._hang_timeout_seconds
        )

    def _change_role(self, process: SupervisedProcess, role: Role) -> None:
        assert isinstance(process, ChildProcess)
        process.change_role(self._launch_specs.with_role(process.spec, role))

    async def _convert(self, process: SupervisedProcess) -> None:
        await self._convert_worker(process.state.address, Role(process.state.role))
