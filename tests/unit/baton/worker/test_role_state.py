"""Tests a worker's role state: conversion from one role to the other and back, and leaving the
cluster for good."""

import pytest

from baton.core.states import Role, WorkerState
from baton.errors import Invalid, Unavailable
from baton.worker.role_state import RoleState

PREFILL, DECODE = Role.PREFILL, Role.DECODE
READY, DRAINING = WorkerState.READY, WorkerState.DRAINING


class RoleRecorder:
    def __init__(self) -> None:
        self.changes: list[tuple[Role, WorkerState]] = []
        self.role_state = RoleState(PREFILL, self._record)
        self.role_state.mark_ready()

    def _record(self) -> None:
        self.changes.append((self.role_state.role, self.role_state.state))


def test_converting_worker_drains_and_takes_the_other_role() -> None:
    recorder = RoleRecorder()
    recorder.role_state.convert(DECODE, 5.0)
    recorder.role_state.convert(DECODE, 6.0)
    assert recorder.role_state.draining_since_seconds == 5.0
    recorder.role_state.finish_role_change()
    recorder.role_state.finish_role_change()
    assert recorder.changes == [(PREFILL, DRAINING), (PREFILL, DRAINING), (DECODE, READY)]
    assert recorder.role_state.draining_since_seconds is None


def test_conversion_back_while_draining_makes_the_worker_ready_at_once() -> None:
    recorder = RoleRecorder()
    recorder.role_state.convert(DECODE, 5.0)
    recorder.role_state.convert(PREFILL, 6.0)
    recorder.role_state.finish_role_change()
    assert recorder.changes == [(PREFILL, DRAINING), (PREFILL, READY)]
    assert recorder.role_state.draining_since_seconds is None


def test_conversion_to_the_current_role_only_reports_it_again() -> None:
    recorder = RoleRecorder()
    recorder.role_state.convert(PREFILL, 5.0)
    assert recorder.changes == [(PREFILL, READY)]


def test_conversion_before_the_start_needs_no_drain() -> None:
    recorder = RoleRecorder()
    role_state = RoleState(PREFILL, lambda: None)
    role_state.convert(DECODE, 5.0)
    role_state.mark_ready()
    assert (role_state.role, role_state.state) == (DECODE, READY)
    assert recorder.changes == []


def test_leaving_worker_can_not_be_converted() -> None:
    recorder = RoleRecorder()
    recorder.role_state.convert(DECODE, 5.0)
    recorder.role_state.start_drain(6.0)
    recorder.role_state.finish_role_change()
    for role in (PREFILL, DECODE):
        with pytest.raises(Unavailable, match="the worker is shutting down"):
            recorder.role_state.convert(role, 7.0)
    state = recorder.role_state
    assert (state.role, state.state, state.draining_since_seconds) == (PREFILL, DRAINING, 5.0)


def test_provisional_leave_can_be_revoked() -> None:
    recorder = RoleRecorder()
    recorder.role_state.convert(DECODE, 5.0)
    assert not recorder.role_state.is_leaving  # it only changes its role
    recorder.role_state.start_drain(6.0, permanent=False)
    recorder.role_state.finish_role_change()
    state = recorder.role_state
    assert state.is_leaving and (state.role, state.state) == (PREFILL, DRAINING)
    recorder.role_state.convert(PREFILL, 7.0)
    assert not recorder.role_state.is_leaving
    assert (state.role, state.state, state.draining_since_seconds) == (PREFILL, READY, None)


def test_permanent_leave_can_not_be_weakened() -> None:
    recorder = RoleRecorder()
    recorder.role_state.start_drain(5.0)
    recorder.role_state.start_drain(6.0, permanent=False)
    with pytest.raises(Unavailable, match="the worker is shutting down"):
        recorder.role_state.convert(PREFILL, 7.0)


def test_leave_before_the_start_begins_draining() -> None:
    role_state = RoleState(PREFILL, lambda: None)
    role_state.start_drain(5.0)
    role_state.mark_ready()
    assert role_state.state is DRAINING


def test_conversion_to_a_non_worker_role_is_rejected() -> None:
    with pytest.raises(Invalid, match="a worker can't become a router"):
        RoleRecorder().role_state.convert(Role.ROUTER, 5.0)
