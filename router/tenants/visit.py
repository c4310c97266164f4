"""One HTTP request of a tenant, from its headers to the end of its answer."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol, Self

from baton.clock import Clock
from baton.core.ids import TenantId
from baton.errors import Overloaded
from router.gate import Gate
from router.record import JourneyRecord
from router.tenants.account import Account
from router.tenants.limited import RateLimited
from router.tenants.roll import Roll
from router.tenants.spent import Spent, spent_on
from router.tenants.tenant import UNLIMITED, Tenant

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
    """Made by :class:`Entrance`, and entered by ``with``, which settles whatever comes of it.
    :meth:`promise` before the work, :meth:`follow` when it begins."""

    __slots__ = (
        "_account",
        "_entrance",
        "_inside",
        "_num_routers",
        "_per_prompt",
        "_promised",
        "_records",
        "_size_bytes",
        "tenant",
    )

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
        self._inside = 0
        """Answers that it has a place in the gate for."""
        self._promised: int | None = None
        self._records: Sequence[JourneyRecord] = ()
        self._per_prompt = 1

    def __enter__(self) -> Self:
        """Raises RateLimited or Overloaded: what is refused here costs next to nothing."""
        entrance, tenant = self._entrance, self.tenant
        try:
            self._take(1)
            self._account.begin(tenant, self._num_routers, self._size_bytes, entrance.now)
        except (RateLimited, Overloaded) as refusal:
            self._give_back()
            entrance.note_refusal(tenant, refusal)
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Gives back what was not used."""
        self._give_back()
        spent = spent_on(self._records, self._per_prompt) if self._records else Spent()
        if self._promised is not None:
            self._account.settle(self.tenant, self._promised, spent.total_tokens)
        self._account.end()
        if self._records:
            self._entrance.ledger.note_spent(self.tenant.id, spent)

    def headers(self) -> dict[str, str]:
        """What is left of the tenant's limits now."""
        if not self.tenant.is_limited:
            return {}
        return self._account.headers(self.tenant, self._num_routers, self._entrance.now)

    def promise(self, prompt_tokens: Sequence[int], per_prompt: int, answer_tokens: int) -> None:
        """Room for ``per_prompt`` answers to each prompt, of up to ``answer_tokens`` each. Raises
        RateLimited or Overloaded. Once."""
        assert self._promised is None, "once"
        count = len(prompt_tokens) * per_prompt
        tokens = sum(prompt_tokens) + count * answer_tokens
        try:
            self._take(count - 1)
            self._account.reserve(
                self.tenant, self._num_routers, tokens, self._size_bytes, self._entrance.now
            )
        except (RateLimited, Overloaded) as refusal:
            self._entrance.note_refusal(self.tenant, refusal)
            raise
        self._promised = tokens

    def follow(self, records: Sequence[JourneyRecord], per_prompt: int) -> None:
        """The answers under way; what they used is settled when all is over."""
        self._records, self._per_prompt = records, per_prompt

    def _take(self, count: int) -> None:
        entrance, tenant = self._entrance, self.tenant
        entrance.gate.take(count, tenant.id, tenant.weight, entrance.is_shared)
        self._inside += count

    def _give_back(self) -> None:
        if self._inside:
            self._entrance.gate.give(self._inside, self.tenant.id)
            self._inside = 0


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
        self.gate = gate
        self.ledger = ledger
        self._roll = roll
        self._num_routers = num_routers
        self._clock = clock
        self._accounts: dict[TenantId, Account] = {}

    def enter(self, tenant_id: TenantId, size_bytes: int = 0, *, idle: bool = False) -> Visit:
        """Before the body, of ``size_bytes`` if that is known, is read. ``idle``: the visit takes
        only what nobody else wants (a batch), so it has no part in the tenant's limits, and is
        counted all the same."""
        tenant = self._roll().tenant(tenant_id)
        if idle:
            return Visit(self, replace(tenant, limits=UNLIMITED), Account(), 1, size_bytes)
        num_routers = max(self._num_routers(), 1) if tenant.is_limited else 1
        return Visit(self, tenant, self._account(tenant_id), num_routers, size_bytes)

    def room(self, tenant: Tenant, count: int) -> AbstractContextManager[None]:
        """In the gate alone, for what is no question (an upload): it raises Overloaded."""
        return self.gate.enter(count, tenant.id, tenant.weight, shared=self.is_shared)

    def note_refusal(self, tenant: Tenant, refusal: RateLimited | Overloaded) -> None:
        reason = refusal.reason if isinstance(refusal, RateLimited) else "full"
        self.ledger.note_refused(tenant.id, reason)

    @property
    def is_shared(self) -> bool:
        return self._roll().is_shared

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
