"""Starts, removes and converts the workers of pools that the supervisor runs itself.

A :class:`SupervisedProcess` keeps one worker alive; backends differ only in its implementation.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import permutations
from typing import ClassVar, Protocol

import structlog

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS, can_serve
from baton.errors import BatonError, Invalid, NotFound, Unavailable
from baton.pools.base import PoolWorker, check_can_serve, parse_pool_sizes
from orchestrator.cluster_state import ProcessState

log = structlog.get_logger(__name__)


class SupervisedProcess(Protocol):
    """Keeps one worker alive until it is stopped, and calls its creator's ``on_change`` with every
    new state."""

    @property
    def state(self) -> ProcessState: ...

    @property
    def is_serving(self) -> bool: ...

    @property
    def is_stopping(self) -> bool: ...

    @property
    def has_failed_to_start(self) -> bool:
        """Whether the worker could not be started and will not be tried again."""
        ...

    async def run(self) -> None:
        """Run the worker until it is stopped, or has failed to start too often."""
        ...

    async def stop(self) -> None:
        """Drain the worker; return when it has exited."""
        ...

    def hold(self) -> None:
        """Let only ``stop`` and ``kill`` end the worker from now on, and no signal from
        elsewhere."""
        ...

    def kill(self) -> None:
        """Kill the worker without draining it. ``run`` returns soon after."""
        ...


OnChange = Callable[[SupervisedProcess], None]


class SupervisedPools(ABC):
    """A :class:`~baton.pools.base.Pools` whose workers are supervised processes. Pools can be
    changed only between ``open`` and ``close``. If ``can_convert`` is true, workers change their
    role when one pool shrinks while another grows; otherwise they stop, and new workers start."""

    can_convert: ClassVar[bool] = False

    def __init__(self) -> None:
        self._processes: dict[WorkerId, SupervisedProcess] = {}
        self._removing: set[WorkerId] = set()
        self._converting: set[WorkerId] = set()
        """Workers that are being notified of their new role."""
        self._sizes: dict[Role, int] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._on_change: OnChange = lambda keeper: None

    @abstractmethod
    def _create_process(self, role: Role, on_change: OnChange) -> SupervisedProcess:
        """Create the process of a new worker, but do not start it."""

    async def check_capacity(self, sizes: Mapping[Role, int]) -> None:  # noqa: B027
        """Raise Unavailable if ``sizes`` has more workers than this backend can ever run."""

    def _change_role(self, process: SupervisedProcess, role: Role) -> None:
        """Set the worker's role in ``process.state``. If the worker restarts, it starts in that
        role. A running worker is only notified of it by :meth:`_convert`."""
        raise NotImplementedError

    async def _convert(self, process: SupervisedProcess) -> None:
        """Make the worker change to the role in ``process.state``. Raises BatonError if that
        fails."""
        raise NotImplementedError

    def open(self, tasks: asyncio.TaskGroup, on_change: OnChange) -> None:
        """Run the workers in ``tasks``, and call ``on_change`` whenever a worker has a new
        state."""
        self._tasks, self._on_change = tasks, on_change

    def close(self) -> None:
        self._tasks = None

    @property
    def processes(self) -> list[SupervisedProcess]:
        """The processes of all workers, oldest first."""
        return list(self._processes.values())

    # -- Pools ------------------------------------------------------------------------------

    async def sizes(self) -> Mapping[Role, int]:
        return dict(self._sizes)

    async def workers(self) -> list[PoolWorker]:
        return [
            PoolWorker(WorkerId(state.id), Role(state.role), state.state, state.node, state.message)
            for state in (keeper.state for keeper in self.processes)
        ]

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        sizes = parse_pool_sizes(wanted)
        tasks = self._check_open()
        check_can_serve(self._sizes | sizes)
        for role, count in sizes.items():
            self._sizes[role] = count
            self._remove_failed(role)
        if self.can_convert:
            able = [role for role in sizes if WORKER_KINDS[role].runs_engine]
            for growing, shrinking in permutations(able, 2):
                self._convert_surplus(tasks, sizes, growing, shrinking)
        for role, count in sizes.items():
            present = self._remaining_processes(role)
            for _ in range(count - len(present)):
                self._start(tasks, role)
            for keeper in removal_order(present)[: max(len(present) - count, 0)]:
                self._start_removal(tasks, keeper)

    async def remove(self, worker_id: WorkerId) -> None:
        tasks = self._check_open()
        keeper = self._processes.get(worker_id)
        if keeper is None:
            known = ", ".join(self._processes)
            raise NotFound(f"there is no worker {worker_id!r}; the workers are: {known}")
        if worker_id in self._removing:
            return
        role = Role(keeper.state.role)
        is_last = self._remaining_processes(role) == [keeper]
        if is_last and not can_serve(self._sizes | {role: 0}):
            raise Invalid(
                f"{worker_id} is the last {role.value} worker, without which the others could not "
                "serve requests"
            )
        self._sizes[role] -= 1
        self._start_removal(tasks, keeper)

    # -- starting, converting, removing -----------------------------------------------------

    async def stop(self) -> None:
        """Drain all workers; return when the last worker has exited."""
        await asyncio.gather(*(keeper.stop() for keeper in self.processes))

    def _check_open(self) -> asyncio.TaskGroup:
        if self._tasks is None:
            raise Unavailable("pools can't be changed while the cluster is starting or stopping")
        return self._tasks

    def _start(self, tasks: asyncio.TaskGroup, role: Role) -> None:
        keeper = self._create_process(role, self._on_change)
        self._processes[WorkerId(keeper.state.id)] = keeper
        tasks.create_task(keeper.run())
        self._on_change(keeper)

    def _convert_surplus(
        self,
        tasks: asyncio.TaskGroup,
        sizes: Mapping[Role, int],
        growing: Role,
        shrinking: Role,
    ) -> None:
        """Convert workers that the pool ``shrinking`` has beyond its size in ``sizes``, at most as
        many as the pool ``growing`` lacks; none if the pools don't grow or shrink. A worker that
        does not serve yet has no state to lose, so it is not converted but replaced."""
        lacking = sizes[growing] - len(self._remaining_processes(growing))
        present = self._remaining_processes(shrinking)
        leaving = removal_order(present)[: max(len(present) - sizes[shrinking], 0)]
        able = [keeper for keeper in leaving if keeper.state.state in ("serving", "converting")]
        for keeper in able[: max(lacking, 0)]:
            self._change_role(keeper, growing)
            if keeper.state.id not in self._converting:
                self._converting.add(WorkerId(keeper.state.id))
                tasks.create_task(self._convert_to_current_role(keeper))

    async def _convert_to_current_role(self, process: SupervisedProcess) -> None:
        """Notify a worker of its new role. If the role changes again meanwhile, notify the worker
        again. If the worker can't be notified, replace it."""
        worker_id, sent_role = WorkerId(process.state.id), ""
        try:
            while sent_role != process.state.role:
                sent_role = process.state.role
                await self._convert(process)
        except BatonError as error:
            log.warning("role_change_failed", id=worker_id, reason=str(error))
            await self._replace(process)
        finally:
            self._converting.discard(worker_id)

    async def _replace(self, process: SupervisedProcess) -> None:
        """Remove a worker, and then start a new one, so that the two never need resources at the
        same time. If the worker has died meanwhile, do nothing, since it restarts in its new role
        anyway."""
        if process.state.id in self._removing or process.state.state != "converting":
            return
        self._removing.add(WorkerId(process.state.id))
        await self._remove(process)
        role = Role(process.state.role)
        if self._tasks is not None and len(self._remaining_processes(role)) < self._sizes[role]:
            self._start(self._tasks, role)

    def _start_removal(self, tasks: asyncio.TaskGroup, process: SupervisedProcess) -> None:
        self._removing.add(WorkerId(process.state.id))
        tasks.create_task(self._remove(process))

    async def _remove(self, process: SupervisedProcess) -> None:
        worker_id = WorkerId(process.state.id)
        await process.stop()
        self._processes.pop(worker_id, None)
        self._removing.discard(worker_id)
        self._on_change(process)

    def _remove_failed(self, role: Role) -> None:
        for keeper in self.processes:
            if keeper.state.role == role and keeper.has_failed_to_start:
                del self._processes[WorkerId(keeper.state.id)]

    def _remaining_processes(self, role: Role) -> list[SupervisedProcess]:
        return [
            keeper
            for keeper in self.processes
            if keeper.state.role == role
            and keeper.state.id not in self._removing
            and not keeper.has_failed_to_start
        ]


def removal_order(processes: list[SupervisedProcess]) -> list[SupervisedProcess]:
    """Return the processes in the order of removal: first those that don't serve, then those that
    do. In both groups, the newest comes first."""
    newest_first = processes[::-1]
    return sorted(newest_first, key=lambda keeper: keeper.is_serving)
