"""One HTTP request of a tenant, from its headers to the end of its answer."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Protocol, Self

from baton.clock import Clock
from baton.core.ids import TenantId
from baton.errors import Overloaded
from router.generation.record import GenerationRecord
from router.tenants.fair_limiter import FairLimiter
from router.tenants.quota import Quota
from router.tenants.quota_client import QuotaClient
from router.tenants.quota_share import UNSHARED, QuotaShare
from router.tenants.quota_store import QuotaRequest
from router.tenants.rate_limit_errors import RateLimited
from router.tenants.request_usage import RequestUsage, usage_of_generations
from router.tenants.tenant import UNLIMITED, Tenant
from router.tenants.tenant_directory import TenantDirectory

DEFAULT_RESERVED_OUTPUT_TOKENS = 512
"""Promised to an answer whose client set no bound, instead of all of the context. What it takes
beyond is paid off afterwards."""

MAX_QUOTAS = 65_536
"""About 500 bytes each. Tenants who have left the file leave here when there are too many."""


class UsageSink(Protocol):
    """Who writes down what tenants used."""

    def note_spent(self, tenant: TenantId, spent: RequestUsage) -> None: ...

    def note_refused(self, tenant: TenantId, reason: str) -> None: ...


class RequestAdmission:
    """Made by :class:`AdmissionController`, and entered by ``with``, which settles whatever comes
    of it. :meth:`promise` before the work, :meth:`follow` when it begins. Where several routers
    share the tenant's limits, :meth:`prepare` and :meth:`prepare_promise` get what this one lacks;
    nothing may be awaited between them and what they are for."""

    __slots__ = (
        "_account",
        "_entrance",
        "_inside",
        "_per_prompt",
        "_promised",
        "_records",
        "_share",
        "_size_bytes",
        "tenant",
    )

    def __init__(
        self,
        entrance: "AdmissionController",
        tenant: Tenant,
        account: Quota,
        share: QuotaShare,
        size_bytes: int,
    ) -> None:
        self.tenant = tenant
        self._entrance = entrance
        self._account = account
        self._share = share
        self._size_bytes = size_bytes
        self._inside = 0
        """Answers that it has a place in the gate for."""
        self._promised: int | None = None
        self._records: Sequence[GenerationRecord] = ()
        self._per_prompt = 1

    async def prepare(self) -> None:
        """Before it is entered."""
        share, bank, now = self._share, self._share.bank, self._entrance.now
        if bank is None or not share.is_common:
            return
        if self._account.has_for_one(self.tenant, share, self._size_bytes, now):
            return
        if await bank.draw(self._account, self._ask_to_begin):
            await bank.look_again(self._account, partial(self._ask_to_begin, again=True))

    async def prepare_promise(self, tokens: int) -> None:
        """Before so many are promised."""
        share, bank = self._share, self._share.bank
        if bank is None or not share.is_common:
            return
        if not self._account.has_tokens(self.tenant, share, tokens, self._entrance.now):
            await bank.draw(self._account, partial(self._ask_for_tokens, tokens))

    def _ask_to_begin(self, *, again: bool = False) -> QuotaRequest | None:
        now = self._entrance.now
        return self._account.ask_to_begin(
            self.tenant, self._share, self._size_bytes, now, again=again
        )

    def _ask_for_tokens(self, tokens: int) -> QuotaRequest | None:
        now = self._entrance.now
        return self._account.ask_for_tokens(self.tenant, self._share, tokens, now)

    def __enter__(self) -> Self:
        """Raises RateLimited or Overloaded: what is refused here costs next to nothing."""
        entrance, tenant = self._entrance, self.tenant
        try:
            self._take(1)
            self._account.begin(tenant, self._share, self._size_bytes, entrance.now)
        except (RateLimited, Overloaded) as refusal:
            self._give_back()
            entrance.note_refusal(tenant, refusal)
            raise
        self._tell_bank()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Gives back what was not used."""
        self._give_back()
        spent = (
            usage_of_generations(self._records, self._per_prompt)
            if self._records
            else RequestUsage()
        )
        if self._promised is not None:
            now, used = self._entrance.now, spent.total_tokens
            self._account.settle(self.tenant, self._share, self._promised, used, now)
        self._account.end()
        self._tell_bank()
        if self._records:
            self._entrance.ledger.note_spent(self.tenant.id, spent)

    def headers(self) -> dict[str, str]:
        """What is left of the tenant's limits now."""
        if not self.tenant.is_limited:
            return {}
        return self._account.headers(self.tenant, self._share, self._entrance.now)

    def promise(self, prompt_tokens: Sequence[int], per_prompt: int, answer_tokens: int) -> None:
        """Room for ``per_prompt`` answers to each prompt, of up to ``answer_tokens`` each. Raises
        RateLimited or Overloaded. Once."""
        assert self._promised is None, "once"
        tokens = num_reserved_tokens(prompt_tokens, per_prompt, answer_tokens)
        try:
            self._take(len(prompt_tokens) * per_prompt - 1)
            self._account.reserve(
                self.tenant, self._share, tokens, self._size_bytes, self._entrance.now
            )
        except (RateLimited, Overloaded) as refusal:
            self._entrance.note_refusal(self.tenant, refusal)
            raise
        self._promised = tokens
        self._tell_bank()

    def follow(self, records: Sequence[GenerationRecord], per_prompt: int) -> None:
        """The answers under way; what they used is settled when all is over."""
        self._records, self._per_prompt = records, per_prompt

    def _tell_bank(self) -> None:
        share = self._share
        if share.bank is not None:
            now = self._entrance.now
            is_due = share.is_common and self._account.is_due(self.tenant, share, now)
            share.bank.watch(self.tenant.id, self._account, is_due=is_due)

    def _take(self, count: int) -> None:
        entrance, tenant = self._entrance, self.tenant
        entrance.gate.take(count, tenant.id, tenant.weight, entrance.is_shared)
        self._inside += count

    def _give_back(self) -> None:
        if self._inside:
            self._entrance.gate.give(self._inside, self.tenant.id)
            self._inside = 0


def num_reserved_tokens(prompt_tokens: Sequence[int], per_prompt: int, answer_tokens: int) -> int:
    """Of all prompts and answers of a request."""
    return sum(prompt_tokens) + len(prompt_tokens) * per_prompt * answer_tokens


class AdmissionController:
    """Where tenants come in. ``num_routers`` share the tenants' limits, through ``bank`` if there
    is one, else evenly."""

    def __init__(
        self,
        gate: FairLimiter,
        roll: Callable[[], TenantDirectory],
        num_routers: Callable[[], int],
        ledger: UsageSink,
        clock: Clock,
        bank: QuotaClient | None = None,
    ) -> None:
        self.gate = gate
        self.ledger = ledger
        self._roll = roll
        self._num_routers = num_routers
        self._clock = clock
        self._bank = bank
        self._accounts: dict[TenantId, Quota] = {}

    def enter(
        self, tenant_id: TenantId, size_bytes: int = 0, *, idle: bool = False
    ) -> RequestAdmission:
        """Before the body, of ``size_bytes`` if that is known, is read. ``idle``: the visit takes
        only what nobody else wants (a batch), so it has no part in the tenant's limits, and is
        counted all the same."""
        tenant = self._roll().tenant(tenant_id)
        if idle:
            return RequestAdmission(
                self, replace(tenant, limits=UNLIMITED), Quota(), UNSHARED, size_bytes
            )
        share = self.share if tenant.is_limited else UNSHARED
        return RequestAdmission(self, tenant, self._account(tenant_id), share, size_bytes)

    async def run(self) -> None:
        """Keeps this router's part of what all share. Until cancelled."""
        if self._bank is not None:
            await self._bank.run(self._roll, lambda: self.share)

    def room(self, tenant: Tenant, count: int) -> AbstractContextManager[None]:
        """In the gate alone, for what is no question (an upload): it raises Overloaded."""
        return self.gate.enter(count, tenant.id, tenant.weight, shared=self.is_shared)

    def note_refusal(self, tenant: Tenant, refusal: RateLimited | Overloaded) -> None:
        reason = refusal.reason if isinstance(refusal, RateLimited) else "full"
        self.ledger.note_refused(tenant.id, reason)

    @property
    def share(self) -> QuotaShare:
        """As of now: routers come and go."""
        num_routers = max(self._num_routers(), 1)
        return QuotaShare(num_routers, self._bank)

    @property
    def is_shared(self) -> bool:
        return self._roll().is_shared

    @property
    def now(self) -> float:
        return self._clock.monotonic()

    def accounts(self) -> dict[TenantId, Quota]:
        return self._accounts

    def _account(self, tenant_id: TenantId) -> Quota:
        account = self._accounts.get(tenant_id)
        if account is None:
            if len(self._accounts) >= MAX_QUOTAS:
                self._forget_strangers()
            account = self._accounts[tenant_id] = Quota()
        return account

    def _forget_strangers(self) -> None:
        known = self._roll().tenants
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if tenant in known or not account.is_idle
        }
