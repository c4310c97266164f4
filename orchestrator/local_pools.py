"""Pools of workers that are child processes of the supervisor, on the same machine."""

from collections.abc import Awaitable, Callable, Mapping

from baton.clock import Clock
from baton.config.sources import variable_name
from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Invalid, Unavailable
from baton.pools.base import PoolWorker, check_can_serve, parse_pool_sizes
from baton.rpc.worker_client import convert_worker
from orchestrator.child_process import ChildProcess, ChildProcessSpec
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
        return ChildProcess(
            self._spec(role),
            self._clock,
            on_change,
            self._drain_timeout_seconds,
            self._hang_timeout_seconds,
        )

    def _spec(self, role: Role) -> ChildProcessSpec:
        return self._launch_specs.worker(role)

    def _change_role(self, process: SupervisedProcess, role: Role) -> None:
        assert isinstance(process, ChildProcess)
        process.change_role(self._launch_specs.with_role(process.spec, role))

    async def _convert(self, process: SupervisedProcess) -> None:
        await self._convert_worker(process.state.address, Role(process.state.role))


class ServerPools(LocalPools):
    """Pools of workers that start a server each, which keep their roles."""

    can_convert = False


class AttachedPools(ServerPools):
    """Pools of workers that use attached servers: each worker has one for itself."""

    async def check_capacity(self, sizes: Mapping[Role, int]) -> None:
        for role, size in sizes.items():
            attached = len(self._servers(role))
            if size > attached:
                raise Unavailable(
                    f"{size} {role.value} workers need as many attached servers; attach names "
                    f"{attached}: add {role.value}=http://HOST:PORT for each of the others"
                )

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        await self.check_capacity({**self._sizes, **wanted})
        await super().scale(wanted)

    def _spec(self, role: Role) -> ChildProcessSpec:
        """Return the spec of a worker with the first server of its pool that no worker uses. Raises
        Unavailable if all are in use, by workers that drain, too."""
        specs = [each.spec for each in self.processes if isinstance(each, ChildProcess)]
        used = {spec.environment.get(variable_name("attach")) for spec in specs}
        free = [each for each in self._servers(role) if each not in used]
        if not free:
            raise Unavailable("every attached server has a worker, which may still be draining")
        return self._launch_specs.attached_worker(role, free[0])

    def _servers(self, role: Role) -> list[str]:
        servers = self._launch_specs.attached_servers
        return [each for each in servers if each.startswith(f"{role.value}=")]


class MockPools(LocalPools):
    """Pools of mock workers, whose sizes are set once, when they start. All workers of a model's
    pools run in one process."""

    can_convert = False

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """Start the workers. Raises Invalid if they were started before."""
        tasks = self._check_open()
        if self._sizes:
            raise Invalid("the number of mock workers can't be changed after the start")
        sizes = parse_pool_sizes(wanted)
        check_can_serve(sizes)
        self._sizes = sizes
        self._start(tasks, Role.MOCK)

    async def remove(self, worker_id: WorkerId) -> None:
        raise Invalid(f"{worker_id} is a mock worker, which can't be drained on its own")

    async def workers(self) -> list[PoolWorker]:
        return [
            PoolWorker(
                WorkerId(f"{keeper.state.id}-{role.value}-{number}"), role, keeper.state.state
            )
            for keeper in self.processes
            for role, count in self._sizes.items()
            for number in range(count)
        ]

    def _spec(self, role: Role) -> ChildProcessSpec:
        return self._launch_specs.mock()
