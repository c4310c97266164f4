"""Admission of tenants' HTTP requests: each counts against its tenant's quota from the arrival of
its headers until its end.

Rate limiters for web frameworks are not used because they only count requests on arrival. Here, the
tokens of a request are reserved before its answers are generated. When the request ends, the tokens
that it used replace the reserved ones. All routers share the limits. The measurements are in
docs/results/tenants.md."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Self

from baton.clock import Clock
from baton.concurrency.budget import Budget
from baton.core.ids import TenantId
from baton.errors import Overloaded
from router.generation.record import GenerationRecord
from router.limits import MAX_TRACKED_TENANTS
from router.tenants.quota import Quota
from router.tenants.quota_client import QuotaClient
from router.tenants.quota_share import UNSHARED, QuotaShare
from router.tenants.quota_store import QuotaRequest
from router.tenants.rate_limit_errors import RateLimited
from router.tenants.request_usage import RequestUsage, usage_of_generations
from router.tenants.tenant import UNLIMITED, Tenant
from router.tenants.tenant_directory import TenantDirectory
from router.tenants.usage_recorder import UsageRecorder

DEFAULT_RESERVED_OUTPUT_TOKENS = 512
"""Tokens reserved for an answer whose client set no ``max_tokens``, instead of the rest of the
context. If the answer has more tokens, they are charged afterwards."""

SlotCount = Callable[[int], None]
"""Acquires or releases this many slots."""


class RequestAdmission:
    """The admission of one request, created by :class:`AdmissionController`. Use it as a context
    manager: entering it admits the request, and leaving it settles the quota (replaces the reserved
    tokens with the tokens used), however the request ends.

    Call :meth:`set_size` once the request is read, :meth:`reserve_tokens` before the answers are
    generated, and :meth:`set_records` when their generation begins. If several routers share the
    tenant's limits, call :meth:`draw_request_quota` before entering and :meth:`draw_token_quota`
    before :meth:`reserve_tokens`: they draw from the shared quota what this router lacks. Await
    nothing between a ``draw_…`` and the call that needs it, since other requests could use up the
    quota meanwhile."""

    __slots__ = (
        "_answers_per_prompt",
        "_charged",
        "_controller",
        "_is_detached",
        "_num_slots",
        "_quota",
        "_records",
        "_release_model_slots",
        "_reserved_tokens",
        "_share",
        "_size_bytes",
        "tenant",
    )

    def __init__(
        self,
        controller: "AdmissionController",
        tenant: Tenant,
        quota: Quota,
        share: QuotaShare,
        size_bytes: int,
    ) -> None:
        self.tenant = tenant
        self._controller = controller
        self._quota = quota
        self._share = share
        self._size_bytes = size_bytes
        self._num_slots = 0
        """The number of slots of the request limiter that this request holds: one per answer, or
        one in total before :meth:`reserve_tokens`."""
        self._reserved_tokens: int | None = None
        self._records: Sequence[GenerationRecord] = ()
        self._answers_per_prompt = 1
        self._charged = RequestUsage()
        self._release_model_slots: SlotCount | None = None
        self._is_detached = False

    async def draw_request_quota(self) -> None:
        """If this router lacks the quota for one request, draw it from the quota store. Call before
        entering the context manager."""
        share, quota_client, now = self._share, self._share.quota_client, self._controller.now
        if quota_client is None or not share.is_shared:
            return
        if self._quota.can_begin(self.tenant, share, self._size_bytes, now):
            return
        if await quota_client.exchange_quota(self._quota, self._build_begin_request):
            await quota_client.retry_slot(
                self._quota, partial(self._build_begin_request, again=True)
            )

    async def draw_token_quota(self, tokens: int) -> None:
        """If this router lacks the quota for ``tokens`` tokens, draw it from the quota store. Call
        before :meth:`reserve_tokens`."""
        share, quota_client = self._share, self._share.quota_client
        if quota_client is None or not share.is_shared:
            return
        if not self._quota.has_tokens(self.tenant, share, tokens, self._controller.now):
            await quota_client.exchange_quota(
                self._quota, partial(self._build_token_request, tokens)
            )

    def _build_begin_request(self, *, again: bool = False) -> QuotaRequest | None:
        now = self._controller.now
        return self._quota.build_begin_request(
            self.tenant, self._share, self._size_bytes, now, again=again
        )

    def _build_token_request(self, tokens: int) -> QuotaRequest | None:
        now = self._controller.now
        return self._quota.build_token_request(self.tenant, self._share, tokens, now)

    def __enter__(self) -> Self:
        """Admit the request. Raises RateLimited if it exceeds a limit of its tenant, and Overloaded
        if it exceeds this router's limit on concurrent answers."""
        controller, tenant = self._controller, self.tenant
        try:
            self._take_slots(1)
            self._quota.begin(tenant, self._share, self._size_bytes, controller.now)
        except (RateLimited, Overloaded) as refusal:
            self._release_slots()
            controller.record_refusal(tenant, refusal)
            raise
        self._notify_quota_client()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._is_detached:
            self._settle()

    def detach(self) -> Callable[[], None]:
        """Let the admission outlast its ``with`` block. Call the returned function once, to settle
        the quota."""
        self._is_detached = True
        return self._settle

    def _settle(self) -> None:
        """Settle the quota (replace the reserved tokens with the tokens used) and record the
        usage."""
        self._release_slots()
        spent = self.usage.beyond(self._charged)
        if self._reserved_tokens is not None:
            now, used = self._controller.now, spent.total_tokens
            self._quota.settle(self.tenant, self._share, self._reserved_tokens, used, now)
        self._quota.end()
        self._notify_quota_client()
        if self._records:
            self._controller.usage_sink.record_usage(self.tenant.id, spent)

    def headers(self) -> dict[str, str]:
        """Return the rate limit headers, which say how much of the tenant's limits is left now."""
        if not self.tenant.is_limited:
            return {}
        return self._quota.headers(self.tenant, self._share, self._controller.now)

    def set_size(self, size_bytes: int) -> None:
        """Replace the size that the request's headers gave: ``size_bytes`` is that of the
        decompressed body and of the stored conversation that it continues."""
        self._size_bytes = size_bytes

    def reserve_tokens(
        self,
        prompt_tokens: Sequence[int],
        per_prompt: int,
        answer_tokens: int,
        field: str = "max_tokens",
    ) -> None:
        """Reserve tokens and slots for ``per_prompt`` answers to each prompt, of up to
        ``answer_tokens`` tokens each. ``prompt_tokens`` contains the number of tokens of each
        prompt; ``field`` is the request's field that limits an answer's tokens, for errors. Call
        this once. Raises RateLimited or Overloaded, as :meth:`__enter__` does."""
        assert self._reserved_tokens is None, "reserve_tokens() may be called only once"
        tokens = num_reserved_tokens(prompt_tokens, per_prompt, answer_tokens)
        try:
            self._take_slots(len(prompt_tokens) * per_prompt - 1)
            self._quota.reserve(
                self.tenant, self._share, tokens, self._size_bytes, self._controller.now, field
            )
        except (RateLimited, Overloaded) as refusal:
            self._controller.record_refusal(self.tenant, refusal)
            raise
        self._reserved_tokens = tokens
        self._notify_quota_client()

    def take_model_slots(self, acquire: SlotCount, release: SlotCount) -> None:
        """Take as many slots of the model's limit as the request holds of the request limiter, with
        ``acquire``, and return them with ``release`` when the request ends. Call this once, after
        :meth:`reserve_tokens`. Raises Overloaded."""
        try:
            acquire(self._num_slots)
        except Overloaded as refusal:
            self._controller.record_refusal(self.tenant, refusal)
            raise
        self._release_model_slots = release

    def set_records(self, records: Sequence[GenerationRecord], per_prompt: int) -> None:
        """Set the records of the answers in progress; when the request ends, its usage is computed
        from them."""
        self._records, self._answers_per_prompt = records, per_prompt

    @property
    def usage(self) -> RequestUsage:
        """What the request has used so far; nothing before :meth:`set_records`."""
        if not self._records:
            return RequestUsage()
        return usage_of_generations(self._records, self._answers_per_prompt)

    def set_charged(self, charged: RequestUsage) -> None:
        """Set the part of the request's usage that the tenant is charged for elsewhere."""
        self._charged = charged

    def _notify_quota_client(self) -> None:
        share = self._share
        if share.quota_client is not None:
            now = self._controller.now
            is_due = share.is_shared and self._quota.needs_early_exchange(self.tenant, share, now)
            share.quota_client.notify_change(self.tenant.id, self._quota, is_due=is_due)

    def _take_slots(self, count: int) -> None:
        controller, tenant = self._controller, self.tenant
        controller.request_limiter.acquire(count, tenant.id, tenant.weight, controller.is_shared)
        self._num_slots += count

    def _release_slots(self) -> None:
        if self._release_model_slots is not None:
            self._release_model_slots(self._num_slots)
            self._release_model_slots = None
        if self._num_slots:
            self._controller.request_limiter.release(self._num_slots, self.tenant.id)
            self._num_slots = 0


def num_reserved_tokens(prompt_tokens: Sequence[int], per_prompt: int, answer_tokens: int) -> int:
    """Return the number of tokens to reserve for all prompts and answers of a request."""
    return sum(prompt_tokens) + len(prompt_tokens) * per_prompt * answer_tokens


class AdmissionController:
    """Admits tenants' requests. All routers (``num_routers()`` of them) share a tenant's limits:
    through ``quota_client`` if there is one, otherwise in equal parts."""

    def __init__(
        self,
        request_limiter: Budget,
        directory: Callable[[], TenantDirectory],
        num_routers: Callable[[], int],
        usage_sink: UsageRecorder,
        clock: Clock,
        quota_client: QuotaClient | None = None,
    ) -> None:
        self.request_limiter = request_limiter
        self.usage_sink = usage_sink
        self._directory = directory
        self._num_routers = num_routers
        self._clock = clock
        self._quota_client = quota_client
        self._quotas: dict[TenantId, Quota] = {}

    def create_admission(
        self, tenant_id: TenantId, size_bytes: int = 0, *, idle: bool = False
    ) -> RequestAdmission:
        """Create the admission of a request before its body is read. ``size_bytes`` is the size of
        the body, or 0 if it is not known. If ``idle`` is True, this is a batch request, which only
        uses otherwise idle capacity: it does not count against the tenant's limits, but its usage
        is recorded."""
        tenant = self._directory().tenant(tenant_id)
        if idle:
            return RequestAdmission(
                self, replace(tenant, limits=UNLIMITED), Quota(), UNSHARED, size_bytes
            )
        share = self.share if tenant.is_limited else UNSHARED
        return RequestAdmission(self, tenant, self._quota_of(tenant_id), share, size_bytes)

    async def run(self) -> None:
        """Exchange quota with the quota store in the background, until cancelled. Return at once if
        there is no quota client."""
        if self._quota_client is not None:
            await self._quota_client.run(self._directory, lambda: self.share)

    def hold_slots(self, tenant: Tenant, count: int) -> AbstractContextManager[None]:
        """Hold ``count`` slots of the request limiter for an operation without tokens, such as an
        upload. Entering the result raises Overloaded if too few slots are free."""
        return self.request_limiter.hold(count, tenant.id, tenant.weight, shared=self.is_shared)

    def record_refusal(self, tenant: Tenant, refusal: RateLimited | Overloaded) -> None:
        reason = refusal.reason if isinstance(refusal, RateLimited) else "full"
        self.usage_sink.record_refusal(tenant.id, reason)

    @property
    def share(self) -> QuotaShare:
        """How this router now shares the tenants' limits with the other routers. It changes when
        routers come and go."""
        num_routers = max(self._num_routers(), 1)
        return QuotaShare(num_routers, self._quota_client)

    @property
    def is_shared(self) -> bool:
        return self._directory().is_shared

    @property
    def now(self) -> float:
        return self._clock.monotonic()

    def quotas(self) -> dict[TenantId, Quota]:
        return self._quotas

    def _quota_of(self, tenant_id: TenantId) -> Quota:
        account = self._quotas.get(tenant_id)
        if account is None:
            if len(self._quotas) >= MAX_TRACKED_TENANTS:
                self._drop_unknown_tenants()
            account = self._quotas[tenant_id] = Quota()
        return account

    def _drop_unknown_tenants(self) -> None:
        known = self._directory().tenants
        self._quotas = {
            tenant: account
            for tenant, account in self._quotas.items()
            if tenant in known or not account.is_idle
        }
