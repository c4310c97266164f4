"""Tests a tenant's limits: rate meters, refusals, and the concurrency limiter. Also checks that no
slot and no reserved token is left over after random requests have ended."""

from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.clock import ManualClock
from baton.concurrency.budget import Budget
from baton.core.ids import Epoch, Incarnation, RequestId, TenantId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.placement import Placement
from baton.errors import Overloaded
from router.generation.record import GenerationRecord
from router.tenants.admission import AdmissionController, RequestAdmission
from router.tenants.leaky_bucket import LeakyBucket
from router.tenants.rate_limit_errors import RateLimited, format_duration
from router.tenants.request_usage import RequestUsage, usage_of_generations
from router.tenants.tenant import Tenant, TenantLimits
from router.tenants.tenant_directory import TenantDirectory, build_tenant_directory

A, B = TenantId("a"), TenantId("b")
WORKER = WorkerRef(WorkerId("w"), "w:1", Incarnation(1))


class FakeUsageSink:
    """A usage sink that keeps everything in memory."""

    def __init__(self) -> None:
        self.spent: dict[TenantId, RequestUsage] = {}
        self.refused: list[tuple[TenantId, str]] = []

    def record_usage(self, tenant: TenantId, spent: RequestUsage) -> None:
        self.spent[tenant] = self.spent.get(tenant, RequestUsage()) + spent

    def record_refusal(self, tenant: TenantId, reason: str) -> None:
        self.refused.append((tenant, reason))


class Admission:
    """An admission controller for tenants with the given ``limits``, by tenant name."""

    def __init__(self, gate: int = 100, routers: int = 1, **limits: TenantLimits) -> None:
        self.clock = ManualClock(1000.0)
        self.gate = Budget(gate)
        self.usage_sink = FakeUsageSink()
        tenants = {
            TenantId(name): Tenant(TenantId(name), limits=own) for name, own in limits.items()
        }
        self.directory: TenantDirectory = build_tenant_directory(tenants, (), needs_keys=True)
        self.routers = routers
        self.controller = AdmissionController(
            self.gate, lambda: self.directory, lambda: self.routers, self.usage_sink, self.clock
        )

    def refusal(self, tenant: TenantId, size_bytes: int = 0) -> RateLimited:
        with (
            pytest.raises(RateLimited) as caught,
            self.controller.create_admission(tenant, size_bytes),
        ):
            pass
        return caught.value


def record(prompt: int, tokens: int, reason: str = "stop", *, cached: int = 0) -> GenerationRecord:
    generation = GenerationRecord(RequestId("r"), 0.0, prompt)
    generation.record_placement(Epoch(1), Placement(None, WORKER, "test"), 0.0)
    generation.num_tokens = tokens
    generation.cached_tokens = cached if tokens else None
    generation.finish_reason = reason
    return generation


def test_rate_meter_drains_over_a_minute() -> None:
    meter = LeakyBucket()
    assert meter.remaining(60, 0.0) == 60
    for _ in range(60):
        assert meter.wait_seconds(1, 60, 0.0) == 0
        meter.spend(1)
    assert meter.wait_seconds(1, 60, 0.0) == 1.0
    assert meter.wait_seconds(60, 60, 0.0) == 60.0
    assert meter.remaining(60, 30.0) == 30
    assert meter.remaining(60, 1e6) == 60


def test_limit_may_change_while_it_is_used() -> None:
    meter = LeakyBucket()
    assert meter.wait_seconds(50, 100, 0.0) == 0
    meter.spend(50)
    assert meter.remaining(100, 0.0) == 50
    assert meter.remaining(20, 0.0) == -30
    assert meter.wait_seconds(1, 20, 0.0) == 31 * 3


def test_request_above_the_limit_needs_an_empty_bucket_and_is_paid_off() -> None:
    meter = LeakyBucket()
    assert meter.wait_seconds(150, 100, 0.0) == 0
    meter.spend(150)
    assert meter.remaining(100, 0.0) == -50
    assert meter.wait_seconds(10, 100, 0.0) == 36.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0001, "1ms"), (0.12, "120ms"), (1.5, "1.5s"), (59.9991, "1m0s"),
     (360, "6m0s"), (61.25, "1m1.25s")],
)  # fmt: skip
def test_durations_have_openais_format(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_requests_per_minute_are_limited() -> None:
    admission = Admission(a=TenantLimits(requests_per_minute=2))
    for left in (1, 0):
        with admission.controller.create_admission(A) as request:
            assert request.headers() == {
                "x-ratelimit-limit-requests": "2",
                "x-ratelimit-remaining-requests": str(left),
                "x-ratelimit-reset-requests": "30s" if left else "1m0s",
            }
    refusal = admission.refusal(A)
    assert (refusal.status, refusal.error_type, refusal.code) == (
        429,
        "requests",
        "rate_limit_exceeded",
    )
    assert refusal.headers == {"retry-after": "30", "retry-after-ms": "30000"}
    assert str(refusal) == (
        "Rate limit reached for tenant a on requests per minute: limit 2, used 2, requested 1. "
        "Please try again in 30s."
    )
    admission.clock.advance(30)
    with admission.controller.create_admission(A):
        pass
    assert admission.usage_sink.refused == [(A, "requests")]


def test_tokens_are_reserved_and_settled() -> None:
    admission = Admission(a=TenantLimits(tokens_per_minute=100))
    with admission.controller.create_admission(A) as request:
        request.reserve_tokens([20], 2, 15)
        assert request.headers()["x-ratelimit-remaining-tokens"] == "50"
        request.set_records([record(20, 5, cached=16), record(20, 5, cached=4)], 2)
    with admission.controller.create_admission(A) as request:
        assert request.headers()["x-ratelimit-remaining-tokens"] == "70"
    assert admission.usage_sink.spent == {A: RequestUsage(1, 20, 4, 10)}


def test_flood_is_refused_before_its_bodies_are_read() -> None:
    admission = Admission(a=TenantLimits(tokens_per_minute=60))
    with admission.controller.create_admission(A, 1000) as request:
        request.reserve_tokens([20], 1, 20)
        request.set_records([record(20, 20)], 1)
    with pytest.raises(RateLimited, match="used 40, requested 30"):
        with admission.controller.create_admission(A, 700) as request:
            request.reserve_tokens([20], 1, 10)
    assert "used 40. Please try again in 10s" in str(admission.refusal(A, 700))
    with admission.controller.create_admission(A, 600) as request:  # a smaller request may fit
        request.reserve_tokens([5], 1, 10)
    admission.refusal(A, 700)
    admission.clock.advance(10)
    with admission.controller.create_admission(A, 700) as request:
        request.reserve_tokens([20], 1, 10)
    assert [reason for _, reason in admission.usage_sink.refused] == ["tokens"] * 3


def test_refused_request_is_judged_by_its_size_once_that_is_known() -> None:
    admission = Admission(a=TenantLimits(tokens_per_minute=60))
    with pytest.raises(RateLimited), admission.controller.create_admission(A, 100) as request:
        request.set_size(1000)
        request.reserve_tokens([20], 1, 20)
        request.set_records([record(20, 20)], 1)
        with admission.controller.create_admission(A, 100) as continued:
            continued.set_size(1000)
            continued.reserve_tokens([20], 1, 10)
    with admission.controller.create_admission(A, 999) as request:
        request.reserve_tokens([5], 1, 5)
    admission.refusal(A, 1000)


def test_flood_is_read_again_once_tokens_are_available() -> None:
    admission = Admission(a=TenantLimits(tokens_per_minute=60))
    with admission.controller.create_admission(A, 10) as slow:
        slow.reserve_tokens([10], 1, 40)
        with pytest.raises(RateLimited), admission.controller.create_admission(A, 700) as request:
            request.reserve_tokens([20], 1, 10)
        admission.refusal(A, 700)
        slow.set_records([record(10, 1)], 1)
    with admission.controller.create_admission(
        A, 700
    ) as request:  # unused tokens are available again
        request.reserve_tokens([20], 1, 10)
        request.set_records([record(20, 10)], 1)
    with pytest.raises(RateLimited), admission.controller.create_admission(A, 700) as request:
        request.reserve_tokens([20], 1, 10)
    admission.directory = build_tenant_directory(
        {A: Tenant(A, limits=TenantLimits(tokens_per_minute=600))}, (), needs_keys=True
    )
    with admission.controller.create_admission(
        A, 700
    ) as request:  # at once after a change of the limit
        request.reserve_tokens([20], 1, 10)


def test_request_that_never_fits_is_not_retryable() -> None:
    admission = Admission(a=TenantLimits(tokens_per_minute=60), b=TenantLimits())
    with pytest.raises(RateLimited, match="Request too large") as caught:
        with admission.controller.create_admission(A) as request:
            request.reserve_tokens([50], 1, 11)
    assert caught.value.headers == {"x-should-retry": "false"}
    with admission.controller.create_admission(B) as request:
        request.reserve_tokens([50_000], 1, 11)
        assert request.headers() == {}


def test_concurrent_requests_are_limited() -> None:
    admission = Admission(a=TenantLimits(concurrent_requests=1))
    with admission.controller.create_admission(A):
        refusal = admission.refusal(A)
        assert refusal.headers == {"retry-after": "1", "retry-after-ms": "1000"}
    with admission.controller.create_admission(A):
        pass


def test_routers_share_the_limits() -> None:
    admission = Admission(routers=2, a=TenantLimits(4, 100, 3))
    with ExitStack() as held:
        requests = [held.enter_context(admission.controller.create_admission(A)) for _ in range(2)]
        assert requests[0].headers()["x-ratelimit-limit-requests"] == "2"
        assert admission.refusal(A).reason == "concurrent"  # half of three, rounded up to two
        requests[0].reserve_tokens([60], 1, 20)  # more than half of 100, but less than all
        assert requests[0].headers()["x-ratelimit-remaining-tokens"] == "0"
    admission.routers = 0  # no router is announced yet, but this one exists
    with admission.controller.create_admission(A):
        pass


@pytest.mark.parametrize(
    ("given", "spent"),
    [
        (record(10, 3, cached=8), RequestUsage(1, 10, 8, 3)),
        (record(10, 0, "cancelled"), RequestUsage(1, 10, 0, 0)),
        (record(10, 2, "cancelled", cached=4), RequestUsage(1, 10, 4, 2)),
        (record(10, 0, "error"), RequestUsage(1, 0, 0, 0)),
        (record(10, 2, "error", cached=4), RequestUsage(1, 10, 4, 2)),
        (
            GenerationRecord(RequestId("r"), 0.0, 10, finish_reason="cancelled"),
            RequestUsage(1, 0, 0, 0),
        ),
    ],
)
def test_usage_of_a_request(given: GenerationRecord, spent: RequestUsage) -> None:
    assert usage_of_generations([given], 1) == spent


# The concurrency limiter


def test_other_requests_use_only_the_concurrency_limiter() -> None:
    admission = Admission(1, a=TenantLimits(1, 1, 1))
    with admission.controller.hold_slots(admission.directory.tenant(A), 1):
        assert admission.gate.num_in_use_by(A) == 1
        with (
            pytest.raises(Overloaded),
            admission.controller.hold_slots(admission.directory.tenant(A), 1),
        ):
            pass
    assert admission.gate.num_in_use == 0
    with admission.controller.create_admission(A):
        pass


# State machine


class AdmissionMachine(RuleBasedStateMachine):
    """Runs requests that arrive, reserve tokens, fail, are cancelled or end, while limits
    change."""

    @initialize()
    def start(self) -> None:
        self.admission = Admission(12, a=TenantLimits(30, 200, 3), b=TenantLimits(None, 100, None))
        self.open: list[tuple[ExitStack, RequestAdmission, list[bool]]] = []
        self.used = {A: 0, B: 0}

    @rule(tenant=st.sampled_from([A, B]), size=st.integers(0, 3000))
    def enter_request(self, tenant: TenantId, size: int) -> None:
        held = ExitStack()
        try:
            request = held.enter_context(self.admission.controller.create_admission(tenant, size))
        except (RateLimited, Overloaded):
            return
        self.open.append((held, request, []))

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        prompts=st.lists(st.integers(1, 60), min_size=1, max_size=3),
        n=st.integers(1, 3),
        answer=st.integers(1, 60),
    )
    def promise(self, data: st.DataObject, prompts: list[int], n: int, answer: int) -> None:
        held, request, promised = data.draw(st.sampled_from(self.open))
        if promised:
            return
        try:
            request.reserve_tokens(prompts, n, answer)
        except (RateLimited, Overloaded):
            self.open.remove((held, request, promised))
            held.close()
            return
        promised.append(True)
        tokens = data.draw(st.integers(0, 2 * answer))  # an answer may be longer than reserved
        reason = data.draw(st.sampled_from(["stop", "error", "cancelled", ""]))
        records = [record(prompt, tokens, reason) for prompt in prompts for _ in range(n)]
        if data.draw(st.booleans()):
            request.set_records(records, n)
            self.used[request.tenant.id] += usage_of_generations(records, n).total_tokens

    @precondition(lambda self: self.open)
    @rule(data=st.data(), crash=st.booleans())
    def end_request(self, data: st.DataObject, crash: bool) -> None:
        entry = data.draw(st.sampled_from(self.open))
        self.open.remove(entry)
        error = RuntimeError("crashed")
        if crash:
            assert not entry[0].__exit__(RuntimeError, error, None)
        else:
            entry[0].close()

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.admission.clock.advance(seconds)

    @rule(limits=st.builds(TenantLimits, *[st.none() | st.integers(1, 300)] * 3))
    def reload(self, limits: TenantLimits) -> None:
        tenants = {**self.admission.directory.tenants, A: Tenant(A, limits=limits)}
        self.admission.directory = build_tenant_directory(tenants, (), needs_keys=True)

    @rule(count=st.integers(0, 4))
    def scale(self, count: int) -> None:
        self.admission.routers = count

    @invariant()
    def quotas_match_open_requests(self) -> None:
        inside = {A: 0, B: 0}
        for _, request, _ in self.open:
            inside[request.tenant.id] += 1
        for tenant, quota in self.admission.controller.quotas().items():
            assert quota.num_running == inside[tenant]
        assert len(self.open) <= self.admission.gate.num_in_use <= 12

    def teardown(self) -> None:
        for held, _, _ in self.open:
            held.close()
        admission = self.admission
        assert admission.gate.num_in_use == 0
        assert all(quota.is_idle for quota in admission.controller.quotas().values())
        reported = {
            tenant: spent.total_tokens for tenant, spent in admission.usage_sink.spent.items()
        }
        assert reported == {tenant: self.used[tenant] for tenant in reported}
        admission.clock.advance(1e6)
        for tenant in (A, B):
            headers = {}
            with admission.controller.create_admission(tenant) as request:
                headers = request.headers()
            limit = headers.get("x-ratelimit-limit-tokens")
            assert headers.get("x-ratelimit-remaining-tokens") == limit


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
