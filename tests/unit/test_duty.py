"""A worker's duty: from one role to the other and back, and for good."""

import pytest

from baton.core.states import Role, WorkerState
from baton.errors import Invalid, Unavailable
from baton.worker.role_state import RoleState

PREFILL, DECODE = Role.PREFILL, Role.DECODE
READY, DRAINING = WorkerState.READY, WorkerState.DRAINING


class House:
    def __init__(self) -> None:
        self.heard: list[tuple[Role, WorkerState]] = []
        self.duty = RoleState(PREFILL, lambda: self.heard.append((self.duty.role, self.duty.state)))
        self.duty.begin()


def test_it_drains_and_takes_the_other_role() -> None:
    house = House()
    house.duty.convert(DECODE, 5.0)
    house.duty.convert(DECODE, 6.0)
    assert house.duty.drains_since == 5.0
    house.duty.settle()
    house.duty.settle()
    assert house.heard == [(PREFILL, DRAINING), (PREFILL, DRAINING), (DECODE, READY)]
    assert house.duty.drains_since is None


def test_back_while_it_drains_it_is_ready_at_once() -> None:
    house = House()
    house.duty.convert(DECODE, 5.0)
    house.duty.convert(PREFILL, 6.0)
    house.duty.settle()
    assert house.heard == [(PREFILL, DRAINING), (PREFILL, READY)]
    assert house.duty.drains_since is None


def test_the_role_that_it_has_is_no_change_but_told_again() -> None:
    house = House()
    house.duty.convert(PREFILL, 5.0)
    assert house.heard == [(PREFILL, READY)]


def test_before_it_is_ready_there_is_nothing_to_drain() -> None:
    house = House()
    duty = RoleState(PREFILL, lambda: None)
    duty.convert(DECODE, 5.0)
    duty.begin()
    assert (duty.role, duty.state) == (DECODE, READY)
    assert house.heard == []


def test_who_leaves_does_not_come_back() -> None:
    house = House()
    house.duty.convert(DECODE, 5.0)
    house.duty.leave(6.0)
    house.duty.settle()
    for role in (PREFILL, DECODE):
        with pytest.raises(Unavailable, match="the worker leaves"):
            house.duty.convert(role, 7.0)
    assert (house.duty.role, house.duty.state, house.duty.drains_since) == (PREFILL, DRAINING, 5.0)


def test_who_leaves_until_it_is_told_to_stay() -> None:
    house = House()
    house.duty.convert(DECODE, 5.0)
    assert not house.duty.leaves  # it comes back, in another role
    house.duty.leave(6.0, for_good=False)
    house.duty.settle()
    assert house.duty.leaves and (house.duty.role, house.duty.state) == (PREFILL, DRAINING)
    house.duty.convert(PREFILL, 7.0)
    assert not house.duty.leaves
    assert (house.duty.role, house.duty.state, house.duty.drains_since) == (PREFILL, READY, None)


def test_for_good_stays_for_good() -> None:
    house = House()
    house.duty.leave(5.0)
    house.duty.leave(6.0, for_good=False)
    with pytest.raises(Unavailable, match="the worker leaves"):
        house.duty.convert(PREFILL, 7.0)


def test_who_was_told_to_leave_before_it_was_ready() -> None:
    duty = RoleState(PREFILL, lambda: None)
    duty.leave(5.0)
    duty.begin()
    assert duty.state is DRAINING


def test_no_other_role() -> None:
    with pytest.raises(Invalid, match="a worker can't become a router"):
        House().duty.convert(Role.ROUTER, 5.0)
