"""Virtual token counters, exactly, and the bound on what two backlogged tenants differ by."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.fairness import VirtualTokenCounters


def counters(**queued: int) -> VirtualTokenCounters:
    """Tenants in the queue, each with what it was given."""
    made = VirtualTokenCounters(slack_tokens=100)
    for tenant in queued:
        made.join(tenant.encode())
    for tenant, count in queued.items():
        made.charge(tenant.encode(), count, 0)
    return made


def test_a_token_of_an_answer_counts_twice() -> None:
    made = counters(a=0, b=0)
    made.charge(b"a", 10, 3)
    assert (made.count(b"a"), made.count(b"b")) == (16, 0)


def test_nothing_is_shared_until_the_second_tenant_comes() -> None:
    made = counters(a=5)
    assert not made.is_shared
    made.join(b"b")
    assert made.is_shared
    assert made.count(b"b") == 5


def test_who_comes_is_lifted_to_the_least_of_those_in_the_queue() -> None:
    made = counters(a=500, b=300)
    made.join(b"c")
    assert made.count(b"c") == 300


def test_who_comes_back_keeps_what_it_was_given_more() -> None:
    made = counters(a=500, b=300)
    made.leave(b"a")
    made.join(b"a")
    assert made.count(b"a") == 500
    made.leave(b"b")
    made.charge(b"a", 100, 0)
    made.join(b"b")
    assert made.count(b"b") == 600


def test_an_empty_queue_remembers_who_left_it_last() -> None:
    made = counters(a=500, b=300)
    made.leave(b"b")
    made.leave(b"a")
    made.join(b"c")
    assert made.count(b"c") == 500


def test_a_tenant_with_two_requests_stays_when_one_leaves() -> None:
    made = counters(a=500, b=0)
    made.join(b"b")
    made.leave(b"b")
    made.charge(b"a", 100, 0)
    made.join(b"b")
    assert made.count(b"b") == 0


def test_arrears_count_in_whole_slacks() -> None:
    made = counters(a=1000, b=1099, c=1100, d=1350)
    assert made.arrears([b"a", b"b", b"c", b"d"]) == {b"a": 0, b"b": 0, b"c": 1, b"d": 3}
    assert made.arrears([b"d"]) == {b"d": 0}


def test_who_never_queued_is_not_counted() -> None:
    made = counters(a=0)
    made.charge(b"b", 10, 10)
    assert not made.is_shared


def test_the_tenant_that_came_first_is_forgotten_first_but_none_in_the_queue() -> None:
    made = VirtualTokenCounters(slack_tokens=1, max_tenants=2)
    for tenant in (b"a", b"b"):
        made.join(tenant)
        made.charge(tenant, 7, 0)
        made.leave(tenant)
    made.join(b"a")  # joins again: b is the older one now
    made.join(b"c")
    assert made.count(b"b") == 0
    made.join(b"d")
    assert [made.count(tenant) for tenant in (b"a", b"c", b"d")] == [14, 14, 14]


@given(
    shares=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 25)), min_size=1, max_size=300),
    prefers=st.sampled_from([b"a", b"b"]),
    slack=st.integers(1, 200),
)
def test_two_backlogged_tenants_are_given_about_the_same(
    shares: list[tuple[int, int]], prefers: bytes, slack: int
) -> None:
    """Whoever the order prefers, and whatever a turn gives: the difference stays below the slack
    and the largest turn."""
    made = VirtualTokenCounters(slack)
    made.join(b"a")
    made.join(b"b")
    for num_input, num_output in shares:
        arrears = made.arrears([b"a", b"b"])
        first = min((b"a", b"b"), key=lambda tenant: (arrears[tenant], tenant != prefers))
        made.charge(first, num_input, num_output)
        assert abs(made.count(b"a") - made.count(b"b")) < slack + 50 + 2 * 25
