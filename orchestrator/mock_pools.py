"""Pools of mock workers: all in one process, which is kept alive like any other."""

from collections.abc import Mapping

from baton.clock import Clock
from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Invalid
from baton.pools.base import PoolWorker, parse_pool_sizes
from orchestrator.child_process import ChildProcess
from orchestrator.launch_specs import LaunchSpecs
from orchestrator.supervised_pools import OnChange, SupervisedPools, SupervisedProcess


class MockPools(SupervisedPools):
    """As many as they were started."""

    def __init__(
        self, recipe: LaunchSpecs, clock: Clock, drain_seconds: float, hung_seconds: float
    ) -> None:
        super().__init__()
        self._recipe = recipe
        self._clock = clock
        self._drain_seconds = drain_seconds
        self._hung_seconds = hung_seconds

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """Once. Raises Invalid."""
        tasks = self._check_open()
        if self._sizes:
            raise Invalid("mock workers stay as many as they were started")
        self._sizes = parse_pool_sizes(wanted)
        self._start(tasks, Role.MOCK)

    async def remove(self, worker_id: WorkerId) -> None:
        raise Invalid(f"{worker_id}: mock workers stay as many as they were started")

    async def workers(self) -> list[PoolWorker]:
        return [
            PoolWorker(
                WorkerId(f"{keeper.state.id}-{role.value}-{number}"), role, keeper.state.state
            )
            for keeper in self.keepers
            for role, count in self._sizes.items()
            for number in range(count)
        ]

    def _keeper(self, role: Role, on_change: OnChange) -> SupervisedProcess:
        spec = self._recipe.mock()
        return ChildProcess(spec, self._clock, on_change, self._drain_seconds, self._hung_seconds)
