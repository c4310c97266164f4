"""Virtual token counters: exact values, and the bound on the difference of two backlogged
tenants."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.fairness import VirtualTokenCounters


def counters(**queued: int) -> VirtualTokenCounters:
    """Create counters of queued tenants, each with the given number of served tokens."""
    made = VirtualTokenCounters(slack_tokens=100)
    for tenant in queued:
        made.join(tenant.encode())
    for tenant, count in queued.items():
        made.charge(tenant.encode(), count, 0)
    return made


def test_output_token_counts_twice() -> None:
    made = counters(a=0, b=0)
    made.charge(b"a", 10, 3)
    assert (made.counter(b"a"), made.counter(b"b")) == (16, 0)


def test_queue_is_shared_once_a_second_tenant_joins() -> None:
    made = counters(a=5)
    assert not made.has_several_tenants
    made.join(b"b")
    assert made.has_several_tenants
    assert made.counter(b"b") == 5


def test_joining_tenant_is_lifted_to_the_least_count_in_the_queue() -> None:
    made = counters(a=500, b=300)
    made.join(b"c")
    assert made.counter(b"c") == 300


def test_returning_tenant_keeps_its_larger_count() -> None:
    made = counters(a=500, b=300)
    made.leave(b"a")
    made.join(b"a")
    assert made.counter(b"a") == 500
    made.leave(b"b")
    made.charge(b"a", 100, 0)
    made.join(b"b")
    assert made.counter(b"b") == 600


def test_empty_queue_remembers_the_count_of_its_last_tenant() -> None:
    made = counters(a=500, b=300)
    made.leave(b"b")
    made.leave(b"a")
    made.join(b"c")
    assert made.counter(b"c") == 500


def test_tenant_with_two_requests_stays_queued_when_one_leaves() -> None:
    made = counters(a=500, b=0)
    made.join(b"b")
    made.leave(b"b")
    made.charge(b"a", 100, 0)
    made.join(b"b")
    assert made.counter(b"b") == 0


def test_arrears_are_multiples_of_the_slack() -> None:
    made = counters(a=1000, b=1099, c=1100, d=1350)
    assert made.service_surpluses([b"a", b"b", b"c", b"d"]) == {b"a": 0, b"b": 0, b"c": 1, b"d": 3}
    assert made.service_surpluses([b"d"]) == {b"d": 0}


def test_tenant_that_never_queued_is_not_counted() -> None:
    made = counters(a=0)
    made.charge(b"b", 10, 10)
    assert not made.has_several_tenants


def test_oldest_tenants_outside_the_queue_are_forgotten_first() -> None:
    made = VirtualTokenCounters(slack_tokens=1, max_tenants=2)
    for tenant in (b"a", b"b"):
        made.join(tenant)
        made.charge(tenant, 7, 0)
        made.leave(tenant)
    made.join(b"a")  # a joins again: b is now the older one
    made.join(b"c")
    assert made.counter(b"b") == 0
    made.join(b"d")
    assert [made.counter(tenant) for tenant in (b"a", b"c", b"d")] == [14, 14, 14]


@given(
    shares=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 25)), min_size=1, max_size=300),
    prefers=st.sampled_from([b"a", b"b"]),
    slack=st.integers(1, 200),
)
def test_two_backlogged_tenants_get_about_the_same_service(
    shares: list[tuple[int, int]], prefers: bytes, slack: int
) -> None:
    """Whichever tenant wins ties and however many tokens a turn has, the difference between the
    tenants' counters stays below the slack plus the largest turn."""
    made = VirtualTokenCounters(slack)
    made.join(b"a")
    made.join(b"b")
    for num_input, num_output in shares:
        arrears = made.service_surpluses([b"a", b"b"])
        first = min((b"a", b"b"), key=lambda tenant: (arrears[tenant], tenant != prefers))
        made.charge(first, num_input, num_output)
        assert abs(made.counter(b"a") - made.counter(b"b")) < slack + 50 + 2 * 25
