"""Budgets: limits on an amount of something in use, such as answers, bytes or threads, which
several owners share fairly."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Self

from baton.concurrency.fair_queue import FairQueue
from baton.errors import Overloaded

RESERVED_FRACTION = 0.25
"""If several owners are configured, those at or above their fair share can't use this fraction of
the limit. So another tenant's request is admitted, however much one tenant sends."""


@dataclass(slots=True)
class _Usage:
    weight: float
    amount: int = 0


class Budget:
    """Limits the amount in use over all owners. ``counted`` is the name of the unit, and ``user``
    that of an owner, in error messages. Use it on one event loop.

    :meth:`acquire` and :meth:`hold` refuse what is too much. The limit is divided by weighted
    max-min fairness among the owners that use any of it now. An owner below its fair share is
    admitted while the total is within the limit; other owners are admitted while the total is
    within ``1 - RESERVED_FRACTION`` of the limit. If only one owner is configured, it is admitted
    while the total is within the limit.

    :meth:`wait` and :meth:`turn` wait instead, and use one unit each: the owners that wait take
    turns, and each may use up to ``owner_limit``. If ``max_waiting`` is given, at most that many
    calls may wait, and a quarter of them for one owner. A budget is used in one of the two ways.
    """

    def __init__(
        self,
        limit: int,
        counted: str = "answers",
        user: str = "tenant",
        *,
        owner_limit: int = 1,
        max_waiting: int | None = None,
    ) -> None:
        self._limit = limit
        self._counted = counted
        self._user = user
        self._owner_limit = owner_limit
        self._max_waiting = max_waiting
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._usage: dict[str, _Usage] = {}
        """Contains only owners that use part of the limit now."""
        self._weights = 0.0
        self.num_in_use = 0

    def set_limit(self, limit: int) -> None:
        """Change the limit. Amounts that were acquired before stay in use, even if they exceed the
        new limit."""
        self._limit = limit

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def num_in_use_by(self, owner: str) -> int:
        usage = self._usage.get(owner)
        return usage.amount if usage is not None else 0

    # -- refusing --------------------------------------------------------------------------------

    def acquire(self, amount: int, owner: str, weight: float, shared: bool) -> None:
        """Add ``amount`` to what the owner uses, until :meth:`release` is called with the same
        amount. Raises Overloaded, and adds nothing, if the rules in the class's docstring do not
        allow that. ``shared`` says whether more than one owner is configured."""
        if amount:
            self._check(amount, owner, weight, shared)
            self._add(amount, owner, weight)

    def release(self, amount: int, owner: str) -> None:
        if not amount:
            return
        usage = self._usage[owner]
        usage.amount -= amount
        self.num_in_use -= amount
        if usage.amount == 0:
            del self._usage[owner]
            self._weights = self._weights - usage.weight if self._usage else 0.0
        if self._waiting:
            self._grant_turn()

    @contextmanager
    def hold(
        self, amount: int = 1, owner: str = "", weight: float = 1.0, *, shared: bool = False
    ) -> Iterator[None]:
        """Acquire ``amount`` for the duration of a ``with`` block."""
        self.acquire(amount, owner, weight, shared)
        try:
            yield
        finally:
            self.release(amount, owner)

    def _add(self, amount: int, owner: str, weight: float) -> None:
        usage = self._usage.get(owner)
        if usage is None:
            usage = self._usage[owner] = _Usage(weight)
            self._weights += weight
        usage.amount += amount
        self.num_in_use += amount

    def _check(self, amount: int, owner: str, weight: float, shared: bool) -> None:
        wanted = self.num_in_use + amount
        if wanted > self._limit:
            raise Overloaded(
                f"this router handles {self.num_in_use} {self._counted} now, and {amount} more "
                f"would exceed its limit of {self._limit}",
                retry_after_seconds=1.0,
            )
        if not shared or wanted <= self._limit - int(RESERVED_FRACTION * self._limit):
            return
        own = self.num_in_use_by(owner)
        share = self._fair_share(owner, weight)
        if own + amount > share:
            reason = (
                f"{amount} more would exceed the {self._user}'s fair share of {share:.0f}; all "
                f"{self._user}s together use {self.num_in_use} of at most {self._limit}"
                if share
                else f"the rest of the limit of {self._limit} is reserved for other {self._user}s"
            )
            raise Overloaded(
                f"this router handles {own} {self._counted} of this {self._user} now, and {reason}",
                retry_after_seconds=1.0,
            )

    def _fair_share(self, owner: str, weight: float) -> float:
        """Return the owner's fair share of the limit, up to which it may also use the reserved
        fraction. If it is the only owner that uses any of the limit now, return 0: the reserved
        fraction then stays free for other owners."""
        usage = self._usage.get(owner)
        if usage is not None and len(self._usage) == 1:
            return 0.0
        weights = self._weights if usage is not None else self._weights + weight
        return self._limit * weight / weights

    # -- waiting ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncGenerator[None]:
        """:meth:`wait` for one unit, and hold it for the duration of the block."""
        await self.wait(owner)
        try:
            yield
        finally:
            self.release(1, owner)

    async def wait(self, owner: str) -> None:
        """Acquire one unit as soon as it is the owner's turn. Raises Overloaded if too many calls
        wait. A call that is cancelled holds nothing."""
        if self._has_room_for(owner):
            self._add(1, owner, 1.0)
            return
        self._check_waiting(owner)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(owner, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(owner, turn)
            else:
                self.release(1, owner)
            raise

    def _has_room_for(self, owner: str) -> bool:
        return self.num_in_use < self._limit and self.num_in_use_by(owner) < self._owner_limit

    def _check_waiting(self, owner: str) -> None:
        if self._max_waiting is None:
            return
        own, owner_limit = self._waiting.num_items_of(owner), max(self._max_waiting // 4, 1)
        if self.num_waiting >= self._max_waiting or own >= owner_limit:
            raise Overloaded(
                f"too many {self._counted} are waiting: {self.num_waiting} in total (limit "
                f"{self._max_waiting}), {own} of this {self._user} (limit {owner_limit})"
            )

    def _grant_turn(self) -> None:
        """Give a released unit to the call whose turn it is. A call may have been cancelled without
        its task having run since; it gets none."""
        granted = self._waiting.take(self._has_room_for, is_wanted=_is_pending)
        if granted is not None:
            owner, turn = granted
            self._add(1, owner, 1.0)
            turn.set_result(None)


def _is_pending(turn: "asyncio.Future[None]") -> bool:
    return not turn.done()


class BudgetShare:
    """The amount of a budget that one request uses. Leaving the ``with`` block, or :meth:`release`,
    returns it. ``shared`` says whether more than one owner is configured."""

    __slots__ = ("_budget", "_is_detached", "_num_held", "_owner", "_shared", "_weight")

    def __init__(self, budget: Budget, owner: str, weight: float, shared: bool) -> None:
        self._budget = budget
        self._owner = owner
        self._weight = weight
        self._shared = shared
        self._num_held = 0
        self._is_detached = False

    def _acquire(self, amount: int) -> None:
        """Use ``amount`` more. Raises Overloaded when the limit is reached; nothing is counted
        then."""
        self._budget.acquire(amount, self._owner, self._weight, self._shared)
        self._num_held += amount

    def _keep(self, amount: int) -> None:
        """Return all but ``amount``, which is at most what is held."""
        self._budget.release(self._num_held - amount, self._owner)
        self._num_held = amount

    def release(self) -> None:
        self._keep(0)

    def detach(self) -> Callable[[], None]:
        """Hold the share also after the ``with`` block. Return a function that releases it."""
        self._is_detached = True
        return self.release

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._is_detached:
            self.release()
