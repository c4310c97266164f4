"""What a tenant may use: meters, refusals, the gate; and accounts are zero when all is over."""

from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.clock import ManualClock
from baton.core.ids import Epoch, Incarnation, RequestId, TenantId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.placement import Placement
from baton.errors import Overloaded
from router.generation.record import GenerationRecord
from router.tenants.admission import AdmissionController, RequestAdmission
from router.tenants.fair_limiter import FairLimiter
from router.tenants.leaky_bucket import LeakyBucket
from router.tenants.rate_limit_errors import RateLimited, format_duration
from router.tenants.request_usage import RequestUsage, usage_of_generations
from router.tenants.tenant import Tenant, TenantLimits
from router.tenants.tenant_directory import TenantDirectory, build_tenant_directory

A, B = TenantId("a"), TenantId("b")
WORKER = WorkerRef(WorkerId("w"), "w:1", Incarnation(1))


class Notes:
    """A ledger that remembers."""

    def __init__(self) -> None:
        self.spent: dict[TenantId, RequestUsage] = {}
        self.refused: list[tuple[TenantId, str]] = []

    def note_spent(self, tenant: TenantId, spent: RequestUsage) -> None:
        self.spent[tenant] = self.spent.get(tenant, RequestUsage()) + spent

    def note_refused(self, tenant: TenantId, reason: str) -> None:
        self.refused.append((tenant, reason))


class Door:
    """An entrance for tenants with these limits."""

    def __init__(self, gate: int = 100, routers: int = 1, **limits: TenantLimits) -> None:
        self.clock = ManualClock(1000.0)
        self.gate = FairLimiter(gate)
        self.notes = Notes()
        tenants = {
            TenantId(name): Tenant(TenantId(name), limits=own) for name, own in limits.items()
        }
        self.roll: TenantDirectory = build_tenant_directory(tenants, (), needs_keys=True)
        self.routers = routers
        self.entrance = AdmissionController(
            self.gate, lambda: self.roll, lambda: self.routers, self.notes, self.clock
        )

    def refusal(self, tenant: TenantId, size_bytes: int = 0) -> RateLimited:
        with pytest.raises(RateLimited) as caught, self.entrance.enter(tenant, size_bytes):
            pass
        return caught.value


def record(prompt: int, tokens: int, reason: str = "stop", *, cached: int = 0) -> GenerationRecord:
    made = GenerationRecord(RequestId("r"), 0.0, prompt)
    made.note_placement(Epoch(1), Placement(None, WORKER, "test"), 0.0)
    made.num_tokens = tokens
    made.cached_tokens = cached if tokens else None
    made.finish_reason = reason
    return made


def test_a_meter_drains_over_a_minute() -> None:
    meter = LeakyBucket()
    assert meter.remaining(60, 0.0) == 60
    for _ in range(60):
        assert meter.wait_seconds(1, 60, 0.0) == 0
        meter.spend(1)
    assert meter.wait_seconds(1, 60, 0.0) == 1.0
    assert meter.full_seconds(60, 0.0) == 60.0
    assert meter.remaining(60, 30.0) == 30
    assert meter.remaining(60, 1e6) == 60


def test_a_limit_may_change_while_it_is_used() -> None:
    meter = LeakyBucket()
    assert meter.wait_seconds(50, 100, 0.0) == 0
    meter.spend(50)
    assert meter.remaining(100, 0.0) == 50
    assert meter.remaining(20, 0.0) == -30
    assert meter.wait_seconds(1, 20, 0.0) == 31 * 3


def test_more_than_there_ever_is_needs_all_and_is_paid_off() -> None:
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
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_requests_per_minute() -> None:
    door = Door(a=TenantLimits(requests_per_minute=2))
    for left in (1, 0):
        with door.entrance.enter(A) as visit:
            assert visit.headers() == {
                "x-ratelimit-limit-requests": "2",
                "x-ratelimit-remaining-requests": str(left),
                "x-ratelimit-reset-requests": "30s" if left else "1m0s",
            }
    refusal = door.refusal(A)
    assert (refusal.status, refusal.kind, refusal.code) == (429, "requests", "rate_limit_exceeded")
    assert refusal.headers == {"retry-after": "30", "retry-after-ms": "30000"}
    assert str(refusal) == (
        "Rate limit reached for tenant a on requests per minute: limit 2, used 2, requested 1. "
        "Please try again in 30s."
    )
    door.clock.advance(30)
    with door.entrance.enter(A):
        pass
    assert door.notes.refused == [(A, "requests")]


def test_tokens_are_promised_and_settled() -> None:
    door = Door(a=TenantLimits(tokens_per_minute=100))
    with door.entrance.enter(A) as visit:
        visit.promise([20], 2, 15)
        assert visit.headers()["x-ratelimit-remaining-tokens"] == "50"
        visit.follow([record(20, 5, cached=16), record(20, 5, cached=4)], 2)
    with door.entrance.enter(A) as visit:
        assert visit.headers()["x-ratelimit-remaining-tokens"] == "70"
    assert door.notes.spent == {A: RequestUsage(1, 20, 4, 10)}


def test_a_flood_is_refused_before_it_is_read() -> None:
    door = Door(a=TenantLimits(tokens_per_minute=60))
    with door.entrance.enter(A, 1000) as visit:
        visit.promise([20], 1, 20)
        visit.follow([record(20, 20)], 1)
    with pytest.raises(RateLimited, match="used 40, requested 30"):
        with door.entrance.enter(A, 700) as visit:
            visit.promise([20], 1, 10)
    assert "used 40. Please try again in 10s" in str(door.refusal(A, 700))
    with door.entrance.enter(A, 600) as visit:  # a smaller one may fit
        visit.promise([5], 1, 10)
    door.refusal(A, 700)
    door.clock.advance(10)
    with door.entrance.enter(A, 700) as visit:
        visit.promise([20], 1, 10)
    assert [reason for _, reason in door.notes.refused] == ["tokens"] * 3


def test_a_flood_is_read_again_as_soon_as_there_is_room() -> None:
    door = Door(a=TenantLimits(tokens_per_minute=60))
    with door.entrance.enter(A, 10) as slow:
        slow.promise([10], 1, 40)
        with pytest.raises(RateLimited), door.entrance.enter(A, 700) as visit:
            visit.promise([20], 1, 10)
        door.refusal(A, 700)
        slow.follow([record(10, 1)], 1)
    with door.entrance.enter(A, 700) as visit:  # what was promised in vain is there again
        visit.promise([20], 1, 10)
        visit.follow([record(20, 10)], 1)
    with pytest.raises(RateLimited), door.entrance.enter(A, 700) as visit:
        visit.promise([20], 1, 10)
    door.roll = build_tenant_directory(
        {A: Tenant(A, limits=TenantLimits(tokens_per_minute=600))}, (), needs_keys=True
    )
    with door.entrance.enter(A, 700) as visit:  # by another limit, at once
        visit.promise([20], 1, 10)


def test_a_request_that_never_fits_is_told_so() -> None:
    door = Door(a=TenantLimits(tokens_per_minute=60), b=TenantLimits())
    with pytest.raises(RateLimited, match="Request too large") as caught:
        with door.entrance.enter(A) as visit:
            visit.promise([50], 1, 11)
    assert caught.value.headers == {"x-should-retry": "false"}
    with door.entrance.enter(B) as visit:
        visit.promise([50_000], 1, 11)
        assert visit.headers() == {}


def test_requests_at_once() -> None:
    door = Door(a=TenantLimits(concurrent_requests=1))
    with door.entrance.enter(A):
        refusal = door.refusal(A)
        assert refusal.headers == {"retry-after": "1", "retry-after-ms": "1000"}
    with door.entrance.enter(A):
        pass


def test_routers_share_the_limits() -> None:
    door = Door(routers=2, a=TenantLimits(4, 100, 3))
    with ExitStack() as held:
        visits = [held.enter_context(door.entrance.enter(A)) for _ in range(2)]
        assert visits[0].headers()["x-ratelimit-limit-requests"] == "2"
        assert door.refusal(A).reason == "concurrent"  # two of three, rounded up
        visits[0].promise([60], 1, 20)  # more than half of 100, and less than all
        assert visits[0].headers()["x-ratelimit-remaining-tokens"] == "0"
    door.routers = 0  # none is announced yet: this one is there
    with door.entrance.enter(A):
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
def test_what_a_request_has_cost(given: GenerationRecord, spent: RequestUsage) -> None:
    assert usage_of_generations([given], 1) == spent


# The gate


def filled(gate: FairLimiter, held: ExitStack, tenant: TenantId, weight: float = 1.0) -> int:
    """How many come in until one is refused."""
    count = 0
    while True:
        try:
            held.enter_context(gate.enter(1, tenant, weight, shared=True))
        except Overloaded:
            return count
        count += 1


def test_one_tenant_leaves_a_reserve_while_there_are_others() -> None:
    gate = FairLimiter(8)
    with ExitStack() as held:
        assert filled(gate, held, A) == 6
        assert filled(gate, held, B) == 2
    assert gate.inside == 0
    with gate.enter(8, A):
        assert gate.inside == 8


def test_who_has_less_than_its_share_takes_every_free_place() -> None:
    gate = FairLimiter(8)
    with ExitStack() as of_a, ExitStack() as of_b:
        first = [of_a.enter_context(ExitStack()) for _ in range(6)]
        for place in first:
            place.enter_context(gate.enter(1, A, shared=True))
        assert filled(gate, of_b, B) == 2
        for place in first[:3]:
            place.close()
            assert filled(gate, of_a, A) == 0 or gate.inside_of(B) >= 4
            filled(gate, of_b, B)
        assert (gate.inside_of(A), gate.inside_of(B)) == (4, 4)


def test_who_is_inside_stays_though_its_share_has_shrunk() -> None:
    gate = FairLimiter(8)
    with ExitStack() as held:
        assert filled(gate, held, A) == 6
        assert filled(gate, held, B) == 2
        with gate.enter(0, A, shared=True):
            assert gate.inside == 8
    with gate.enter(0, A, shared=True):
        assert gate.inside == 0


def test_what_is_no_question_takes_a_place_in_the_gate_alone() -> None:
    door = Door(1, a=TenantLimits(1, 1, 1))
    with door.entrance.room(door.roll.tenant(A), 1):
        assert door.gate.inside_of(A) == 1
        with pytest.raises(Overloaded), door.entrance.room(door.roll.tenant(A), 1):
            pass
    assert door.gate.inside == 0
    with door.entrance.enter(A):
        pass


def test_shares_go_by_weight() -> None:
    gate = FairLimiter(12)
    with ExitStack() as held, ExitStack() as of_a:
        assert filled(gate, of_a, A) == 9
        assert filled(gate, held, B, 2.0) == 3
        of_a.close()
        assert filled(gate, held, B, 2.0) == 6
        assert filled(gate, held, A) == 3


# Whatever happens


class EntranceMachine(RuleBasedStateMachine):
    """Requests that come, are promised tokens, fail, leave or end, under limits that change."""

    @initialize()
    def start(self) -> None:
        self.door = Door(12, a=TenantLimits(30, 200, 3), b=TenantLimits(None, 100, None))
        self.open: list[tuple[ExitStack, RequestAdmission, list[bool]]] = []
        self.used = {A: 0, B: 0}

    @rule(tenant=st.sampled_from([A, B]), size=st.integers(0, 3000))
    def come(self, tenant: TenantId, size: int) -> None:
        held = ExitStack()
        try:
            visit = held.enter_context(self.door.entrance.enter(tenant, size))
        except (RateLimited, Overloaded):
            return
        self.open.append((held, visit, []))

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        prompts=st.lists(st.integers(1, 60), min_size=1, max_size=3),
        n=st.integers(1, 3),
        answer=st.integers(1, 60),
    )
    def promise(self, data: st.DataObject, prompts: list[int], n: int, answer: int) -> None:
        held, visit, promised = data.draw(st.sampled_from(self.open))
        if promised:
            return
        try:
            visit.promise(prompts, n, answer)
        except (RateLimited, Overloaded):
            self.open.remove((held, visit, promised))
            held.close()
            return
        promised.append(True)
        tokens = data.draw(st.integers(0, 2 * answer))  # more, where no bound was set
        reason = data.draw(st.sampled_from(["stop", "error", "cancelled", ""]))
        records = [record(prompt, tokens, reason) for prompt in prompts for _ in range(n)]
        if data.draw(st.booleans()):
            visit.follow(records, n)
            self.used[visit.tenant.id] += usage_of_generations(records, n).total_tokens

    @precondition(lambda self: self.open)
    @rule(data=st.data(), crash=st.booleans())
    def leave(self, data: st.DataObject, crash: bool) -> None:
        entry = data.draw(st.sampled_from(self.open))
        self.open.remove(entry)
        error = RuntimeError("crashed")
        if crash:
            assert not entry[0].__exit__(RuntimeError, error, None)
        else:
            entry[0].close()

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.door.clock.advance(seconds)

    @rule(limits=st.builds(TenantLimits, *[st.none() | st.integers(1, 300)] * 3))
    def reload(self, limits: TenantLimits) -> None:
        tenants = {**self.door.roll.tenants, A: Tenant(A, limits=limits)}
        self.door.roll = build_tenant_directory(tenants, (), needs_keys=True)

    @rule(count=st.integers(0, 4))
    def scale(self, count: int) -> None:
        self.door.routers = count

    @invariant()
    def the_books_balance(self) -> None:
        inside = {A: 0, B: 0}
        for _, visit, _ in self.open:
            inside[visit.tenant.id] += 1
        for tenant, account in self.door.entrance.accounts().items():
            assert account.running == inside[tenant]
        assert len(self.open) <= self.door.gate.inside <= 12

    def teardown(self) -> None:
        for held, _, _ in self.open:
            held.close()
        door = self.door
        assert door.gate.inside == 0
        assert all(account.is_idle for account in door.entrance.accounts().values())
        told = {tenant: spent.total_tokens for tenant, spent in door.notes.spent.items()}
        assert told == {tenant: self.used[tenant] for tenant in told}
        door.clock.advance(1e6)
        for tenant in (A, B):
            headers = {}
            with door.entrance.enter(tenant) as visit:
                headers = visit.headers()
            limit = headers.get("x-ratelimit-limit-tokens")
            assert headers.get("x-ratelimit-remaining-tokens") == limit


TestEntrance = EntranceMachine.TestCase
TestEntrance.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
