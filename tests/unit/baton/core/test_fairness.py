"""Tests the exact values of virtual token counters, and the bound on the difference between two
backlogged tenants."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.fairness import VirtualTokenCounters


def counters(**queued: int) -> VirtualTokenCounters:
    """Create counters for the tenants in ``queued``, each of which has one request in the queue.
    The value is the number of prompt tokens that the tenant has already been charged."""
    token_counters = VirtualTokenCounters()
    for tenant in queued:
        token_counters.join(tenant.encode())
    for tenant, count in queued.items():
        token_counters.charge(tenant.encode(), count, 0)
    return token_counters


def test_output_token_counts_twice() -> None:
    token_counters = counters(a=0, b=0)
    token_counters.charge(b"a", 10, 3)
    assert (token_counters.counter(b"a"), token_counters.counter(b"b")) == (16, 0)


def test_queue_is_shared_once_a_second_tenant_joins() -> None:
    token_counters = counters(a=5)
    assert not token_counters.has_several_tenants
    token_counters.join(b"b")
    assert token_counters.has_several_tenants
    assert token_counters.counter(b"b") == 5


def test_joining_tenant_is_lifted_to_the_least_count_in_the_queue() -> None:
    token_counters = counters(a=500, b=300)
    token_counters.join(b"c")
    assert token_counters.counter(b"c") == 300


def test_returning_tenant_keeps_its_larger_count() -> None:
    token_counters = counters(a=500, b=300)
    token_counters.leave(b"a")
    token_counters.join(b"a")
    assert token_counters.counter(b"a") == 500
    token_counters.leave(b"b")
    token_counters.charge(b"a", 100, 0)
    token_counters.join(b"b")
    assert token_counters.counter(b"b") == 600


def test_empty_queue_remembers_the_count_of_its_last_tenant() -> None:
    token_counters = counters(a=500, b=300)
    token_counters.leave(b"b")
    token_counters.leave(b"a")
    token_counters.join(b"c")
    assert token_counters.counter(b"c") == 500


def test_tenant_with_two_requests_stays_queued_when_one_leaves() -> None:
    token_counters = counters(a=500, b=0)
    token_counters.join(b"b")
    token_counters.leave(b"b")
    token_counters.charge(b"a", 100, 0)
    token_counters.join(b"b")
    assert token_counters.counter(b"b") == 0


def test_finish_times_add_up_within_a_tenant() -> None:
    token_counters = counters(a=1000, b=400)
    prompts = [(b"a", 10, 1.0), (b"b", 700, 1.0), (b"a", 20, 2.0), (b"b", 1, 1.0)]
    assert token_counters.virtual_finishes(prompts) == [1010, 1100, 1020, 1101]


def test_tenants_with_the_lowest_counter_are_least_served() -> None:
    token_counters = counters(a=1000, b=400, c=400)
    assert token_counters.least_served([b"a", b"b", b"c"]) == {b"b", b"c"}
    assert token_counters.least_served([b"a"]) == {b"a"}
    assert token_counters.least_served([]) == set()


def test_tenant_that_never_queued_is_not_counted() -> None:
    token_counters = counters(a=0)
    token_counters.charge(b"b", 10, 10)
    assert not token_counters.has_several_tenants


def test_oldest_tenants_outside_the_queue_are_forgotten_first() -> None:
    token_counters = VirtualTokenCounters(max_tenants=2)
    for tenant in (b"a", b"b"):
        token_counters.join(tenant)
        token_counters.charge(tenant, 7, 0)
        token_counters.leave(tenant)
    token_counters.join(b"a")  # a joins again, so that b has now been queued for longer
    token_counters.join(b"c")
    assert token_counters.counter(b"b") == 0
    token_counters.join(b"d")
    assert [token_counters.counter(tenant) for tenant in (b"a", b"c", b"d")] == [14, 14, 14]


@given(
    one=st.lists(st.integers(1, 50), min_size=1, max_size=100),
    other=st.lists(st.integers(1, 50), min_size=1, max_size=100),
    prefers=st.sampled_from([b"a", b"b"]),
)
def test_two_backlogged_tenants_get_about_the_same_service(
    one: list[int], other: list[int], prefers: bytes
) -> None:
    """Whichever tenant wins ties, the tenants' counters differ by at most the longest prompt."""
    token_counters = VirtualTokenCounters()
    queues = {b"a": one[::-1], b"b": other[::-1]}
    for tenant in queues:
        token_counters.join(tenant)
    while all(queues.values()):
        heads = [(tenant, queue[-1], 1.0) for tenant, queue in queues.items()]
        finishes = dict(zip(queues, token_counters.virtual_finishes(heads), strict=True))
        first = min(queues, key=lambda tenant: (finishes[tenant], tenant != prefers))
        token_counters.charge(first, queues[first].pop(), 0)
        difference = abs(token_counters.counter(b"a") - token_counters.counter(b"b"))
        assert difference <= max(one + other)
