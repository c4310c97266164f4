"""Pools of mock workers. All mock workers of a model run in one supervised process."""

from collections.abc import Mapping

from baton.clock import Clock
from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Invalid
from baton.pools.base import PoolWorker, check_can_serve, parse_pool_sizes
from orchestrator.child_process import ChildProcess
from orchestrator.launch_specs import LaunchSpecs
from orchestrator.supervised_pools import OnChange, SupervisedPools, SupervisedProcess


class MockPools(SupervisedPools):
    """Pools of mock workers, whose sizes are set once, when they start. All workers of a model's
    pools run in one process."""

    def __init__(
        self,
        launch_specs: LaunchSpecs,
        clock: Clock,
        drain_timeout_seconds: float,
        hang_timeout_seconds: float,
    ) -> None:
        super().__init__()
        self._launch_specs = launch_specs
        self._clock = clock
        self._drain_timeout_seconds = drain_timeout_seconds
        self._hang_timeout_seconds = hang_timeout_seconds

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

    def _create_process(self, role: Role, on_change: OnChange) -> SupervisedProcess:
        spec = self._launch_specs.mock()
        return ChildProcess(
            spec, self._clock, on_change, self._drain_timeout_seconds, self._hang_timeout_seconds
        )
