"""Pools whose workers the supervisor keeps itself: numbering, growing, shrinking, removing.

What keeps one worker alive is a :class:`SupervisedProcess`; what kind of keeper is all that differs
between backends.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

import structlog

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import BatonError, Invalid, NotFound, Unavailable
from baton.pools.base import WORKER_ROLES, PoolWorker, parse_pool_sizes
from orchestrator.cluster_state import ProcessState

log = structlog.get_logger(__name__)


class SupervisedProcess(Protocol):
    """Keeps one worker alive until told to stop. Its reports go to whoever made it."""

    @property
    def state(self) -> ProcessState: ...

    @property
    def serving(self) -> bool: ...

    @property
    def stopping(self) -> bool: ...

    @property
    def failed_to_start(self) -> bool:
        """For good: it won't be tried again."""
        ...

    async def run(self) -> None:
        """Until stopped, or it has failed to start too often."""
        ...

    async def stop(self) -> None:
        """Drains it; returns when it has ended."""
        ...

    def kill(self) -> None:
        """Ends it without a drain. ``run`` returns soon after."""
        ...


OnChange = Callable[[SupervisedProcess], None]


class SupervisedPools(ABC):
    """A :class:`~baton.pools.base.Pools` over keepers. Nothing can be changed before
    ``open`` and after ``close``. Where ``can_convert``, workers that one pool gives up and the
    other wants change their role; elsewhere they stop, and others start."""

    can_convert: ClassVar[bool] = False

    def __init__(self) -> None:
        self._keepers: dict[WorkerId, SupervisedProcess] = {}
        self._leaving: set[WorkerId] = set()
        self._converting: set[WorkerId] = set()
        """Who is being told its role."""
        self._sizes: dict[Role, int] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._on_change: OnChange = lambda keeper: None

    @abstractmethod
    def _keeper(self, role: Role, on_change: OnChange) -> SupervisedProcess:
        """A new one, not started, for a worker that nobody has had before."""

    async def check(self, sizes: Mapping[Role, int]) -> None:  # noqa: B027
        """Raises Unavailable when so many workers can never run here."""

    def _change_role(self, keeper: SupervisedProcess, role: Role) -> None:
        """The keeper's own part: its state tells the new role, and its worker comes back in it."""
        raise NotImplementedError

    async def _convert(self, keeper: SupervisedProcess) -> None:
        """Tells its worker the role that its state has. Raises BatonError."""
        raise NotImplementedError

    def open(self, tasks: asyncio.TaskGroup, on_change: OnChange) -> None:
        """Workers live in ``tasks``; ``on_change`` hears of each one's every new state."""
        self._tasks, self._on_change = tasks, on_change

    def close(self) -> None:
        self._tasks = None

    @property
    def keepers(self) -> list[SupervisedProcess]:
        """All, oldest first."""
        return list(self._keepers.values())

    # -- Pools ------------------------------------------------------------------------------

    async def sizes(self) -> Mapping[Role, int]:
        return dict(self._sizes)

    async def workers(self) -> list[PoolWorker]:
        return [
            PoolWorker(WorkerId(state.id), Role(state.role), state.state, state.node, state.message)
            for state in (keeper.state for keeper in self.keepers)
        ]

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        sizes = parse_pool_sizes(wanted)
        tasks = self._check_open()
        for role, count in sizes.items():
            self._sizes[role] = count
            self._forget_failed(role)
        if self.can_convert and len(sizes) == len(WORKER_ROLES):
            self._exchange(tasks, sizes)
        for role, count in sizes.items():
            present = self._staying(role)
            for _ in range(count - len(present)):
                self._start(tasks, role)
            for keeper in removal_order(present)[: max(len(present) - count, 0)]:
                self._retire(tasks, keeper)

    async def remove(self, worker_id: WorkerId) -> None:
        tasks = self._check_open()
        keeper = self._keepers.get(worker_id)
        if keeper is None:
            there = ", ".join(self._keepers)
            raise NotFound(f"there is no worker {worker_id!r}; there are {there}")
        if worker_id in self._leaving:
            return
        role = Role(keeper.state.role)
        if self._staying(role) == [keeper]:
            raise Invalid(f"{worker_id} is the last {role.value} worker")
        self._sizes[role] -= 1
        self._retire(tasks, keeper)

    # -- life -------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Drains all; returns when the last one has ended."""
        await asyncio.gather(*(keeper.stop() for keeper in self.keepers))

    def _check_open(self) -> asyncio.TaskGroup:
        if self._tasks is None:
            raise Unavailable("the cluster is starting or stopping")
        return self._tasks

    def _start(self, tasks: asyncio.TaskGroup, role: Role) -> None:
        keeper = self._keeper(role, self._on_change)
        self._keepers[WorkerId(keeper.state.id)] = keeper
        tasks.create_task(keeper.run())
        self._on_change(keeper)

    def _exchange(self, tasks: asyncio.TaskGroup, sizes: Mapping[Role, int]) -> None:
        """Of those that one pool gives up, as many as the other lacks change their role. Who does
        not serve yet has nothing to lose, and is replaced."""
        surplus = {role: len(self._staying(role)) - count for role, count in sizes.items()}
        taker, giver = sorted(WORKER_ROLES, key=lambda role: surplus[role])
        leaving = removal_order(self._staying(giver))[: max(surplus[giver], 0)]
        able = [keeper for keeper in leaving if keeper.state.state in ("serving", "converting")]
        for keeper in able[: max(-surplus[taker], 0)]:
            self._change_role(keeper, taker)
            if keeper.state.id not in self._converting:
                self._converting.add(WorkerId(keeper.state.id))
                tasks.create_task(self._tell_role(keeper))

    async def _tell_role(self, keeper: SupervisedProcess) -> None:
        """One that changes its role again meanwhile is told once more. One that can't be told is
        replaced."""
        worker_id, told = WorkerId(keeper.state.id), ""
        try:
            while told != keeper.state.role:
                told = keeper.state.role
                await self._convert(keeper)
        except BatonError as error:
            log.warning("not_converted", id=worker_id, reason=str(error))
            await self._replace(keeper)
        finally:
            self._converting.discard(worker_id)

    async def _replace(self, keeper: SupervisedProcess) -> None:
        """One after the other, so that both never need a place. Who has died meanwhile comes back
        in its new role anyway."""
        if keeper.state.id in self._leaving or keeper.state.state != "converting":
            return
        self._leaving.add(WorkerId(keeper.state.id))
        await self._remove(keeper)
        role = Role(keeper.state.role)
        if self._tasks is not None and len(self._staying(role)) < self._sizes[role]:
            self._start(self._tasks, role)

    def _retire(self, tasks: asyncio.TaskGroup, keeper: SupervisedProcess) -> None:
        self._leaving.add(WorkerId(keeper.state.id))
        tasks.create_task(self._remove(keeper))

    async def _remove(self, keeper: SupervisedProcess) -> None:
        worker_id = WorkerId(keeper.state.id)
        await keeper.stop()
        self._keepers.pop(worker_id, None)
        self._leaving.discard(worker_id)
        self._on_change(keeper)

    def _forget_failed(self, role: Role) -> None:
        for keeper in self.keepers:
            if keeper.state.role == role and keeper.failed_to_start:
                del self._keepers[WorkerId(keeper.state.id)]

    def _staying(self, role: Role) -> list[SupervisedProcess]:
        return [
            keeper
            for keeper in self.keepers
            if keeper.state.role == role
            and keeper.state.id not in self._leaving
            and not keeper.failed_to_start
        ]


def removal_order(keepers: list[SupervisedProcess]) -> list[SupervisedProcess]:
    """In the order in which they may go: who does not serve yet first, then the newest."""
    newest_first = keepers[::-1]
    return sorted(newest_first, key=lambda keeper: keeper.serving)
