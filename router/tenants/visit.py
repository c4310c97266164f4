"""One HTTP request of a tenant, from its headers to the end of its answer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Protocol

from baton.clock import Clock
from baton.core.ids import TenantId
from baton.errors import Overloaded
from router.gate import Gate
from router.record import JourneyRecord
from router.tenants.account import Account
from router.tenants.limited import RateLimited
from router.tenants.roll import Roll
from router.tenants.spent import Spent, spent_on
from router.tenants.tenant import Limits, Tenant

UNSAID_ANSWER_TOKENS = 512
"""Promised to an answer whose client set no bound, instead of all of the context. What it takes
beyond is paid off afterwards."""

MAX_ACCOUNTS = 65_536
"""About 500 bytes each. Tenants who have left the file leave here when there are too many."""


class Ledger(Protocol):
    """Who writes down what tenants used."""

    def note_spent(self, tenant: TenantId, spent: Spent) -> None: ...

    def note_refused(self, tenant: TenantId, reason: str) -> None: ...


class Visit:
    """:meth:`promise` before the work, :meth:`follow` when it begins. Made by :class:`Entrance`,
    which settles whatever comes of it."""

    def __init__(
        self,
        entrance: "Entrance",
        tenant: Tenant,
        account: Account,
        num_routers: int,
        size_bytes: int,
    ) -> None:
        self.tenant = tenant
        self._entrance = entrance
        self._account = account
        self._num_routers = num_routers
        self._size_bytes = size_bytes
        self._promised: int | None = None
        self._records: Sequence[JourneyRecord] = ()
        self._per_prompt = 1
        self._room = ExitStack()

    def headers(self) -> dict[str, str]:
        """What is left of the tenant's limits now."""
        return self._account.headers(self.tenant, self._num_routers, self._entrance.now)

    def promise(self, prompt_tokens: Sequence[int], per_prompt: int, answer_tokens: int) -> None:
        """Room for ``per_prompt`` answers to each prompt, of up to ``answer_tokens`` each. Raises
        RateLimited or Overloaded. Once."""
        assert self._promised is None, "once"
        entrance, count = self._entrance, len(prompt_tokens) * per_prompt
        tokens = sum(prompt_tokens) + count * answer_tokens
        with entrance.noting_refusals(self.tenant):
            self._room.enter_context(entrance.room(self.tenant, count - 1))
            self._account.reserve(
                self.tenant, self._num_routers, tokens, self._size_bytes, entrance.now
            )
        self._promised = tokens

    def follow(self, records: Sequence[JourneyRecord], per_prompt: int) -> None:
        """The answers under way; what they used is settled when all is over."""
        self._records, self._per_prompt = records, per_prompt

    def close(self) -> None:
        """Gives back what was not used."""
        self._room.close()
        spent = spent_on(self._records, self._per_prompt) if self._records else Spent()
        if self._promised is not None:
            self._account.settle(self.tenant, self._promised, spent.total_tokens)
        if self._records:
            self._entrance.ledger.note_spent(self.tenant.id, spent)


class Entrance:
    """Where tenants come in. ``num_routers`` share the tenants' limits."""

    def __init__(
        self,
        gate: Gate,
        roll: Callable[[], Roll],
        num_routers: Callable[[], int],
        ledger: Ledger,
        clock: Clock,
    ) -> None:
        self.ledger = ledger
        self._gate = gate
        self._roll = roll
        self._num_routers = num_routers
        self._clock = clock
        self._accounts: dict[TenantId, Account] = {}

    @contextmanager
    def enter(
        self, tenant_id: TenantId, size_bytes: int = 0, *, idle: bool = False
    ) -> Iterator[Visit]:
        """Before the body, of ``size_bytes`` if that is known, is read: what is refused here costs
        next to nothing. Raises RateLimited or Overloaded. ``idle``: it takes only what nobody else
        wants (a batch), so it has no part in the tenant's limits, and is counted all the same."""
        tenant = self._roll().tenant(tenant_id)
        account = self._account(tenant_id)
        if idle:
            tenant, account = replace(tenant, limits=Limits()), Account()
        num_routers = max(self._num_routers(), 1) if tenant.is_limited else 1
        with ExitStack() as held:
            with self.noting_refusals(tenant):
                held.enter_context(self.room(tenant, 1))
                account.begin(tenant, num_routers, size_bytes, self.now)
            held.callback(account.end)
            visit = Visit(self, tenant, account, num_routers, size_bytes)
            held.callback(visit.close)
            yield visit

    def room(self, tenant: Tenant, count: int) -> AbstractContextManager[None]:
        """In the gate, for so many answers."""
        return self._gate.enter(count, tenant.id, tenant.weight, shared=self._roll().is_shared)

    @contextmanager
    def noting_refusals(self, tenant: Tenant) -> Iterator[None]:
        try:
            yield
        except RateLimited as refusal:
            self.ledger.note_refused(tenant.id, refusal.reason)
            raise
        except Overloaded:
            self.ledger.note_refused(tenant.id, "full")
            raise

    @property
    def now(self) -> float:
        return self._clock.monotonic()

    def accounts(self) -> dict[TenantId, Account]:
        return self._accounts

    def _account(self, tenant_id: TenantId) -> Account:
        account = self._accounts.get(tenant_id)
        if account is None:
            if len(self._accounts) >= MAX_ACCOUNTS:
                self._forget_strangers()
            account = self._accounts[tenant_id] = Account()
        return account

    def _forget_strangers(self) -> None:
        known = self._roll().tenants
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if tenant in known or not account.is_idle
        }
