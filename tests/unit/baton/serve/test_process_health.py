"""Tests how hangs are detected: loading a model does not count as a hang while it makes progress,
however long it takes."""

from baton.clock import ManualClock
from baton.serve.process_health import MAX_ANSWER_SECONDS, MAX_LOAD_STALL_SECONDS, ProcessHealth

GIGABYTE = 10**9


def begun() -> tuple[ProcessHealth, ManualClock]:
    clock = ManualClock()
    health = ProcessHealth(clock)
    health.start()
    return health, clock


def test_states_and_descriptions_of_a_program() -> None:
    health, _ = begun()
    assert (health.is_ready, health.has_served, health.describe()) == (False, False, "starting")
    health.record_load_progress("weights", 2 * GIGABYTE, 16 * GIGABYTE)
    assert health.describe() == "starting: weights: 2.00 of 16.00 GB"
    health.set_state("serving")
    assert (health.is_ready, health.has_served, health.describe()) == (True, True, "serving")
    health.set_state("draining")
    assert (health.is_ready, health.has_served, health.describe()) == (False, True, "draining")


def test_blocked_event_loop_is_a_hang() -> None:
    health, clock = begun()
    health.set_state("serving")
    clock.advance(20.0)
    assert health.describe_hang(20.0) == ""
    clock.advance(1.0)
    assert health.describe_hang(20.0) == "the event loop has been blocked for 21 s"
    assert health.describe_hang(0.0) == ""  # 0 means that there is no bound
    health.record_heartbeat()
    assert health.describe_hang(20.0) == ""


def test_thread_that_does_not_answer_is_a_hang() -> None:
    """The process's event loop keeps running meanwhile."""
    health, clock = begun()
    health.set_state("serving")
    with health.waiting_for("the engine"):
        clock.advance(MAX_ANSWER_SECONDS)
        health.record_heartbeat()
        assert health.describe_hang(20.0) == health.describe_unanswered_wait() == ""
        clock.advance(1.0)
        assert health.describe_hang(20.0) == "the engine has not answered for 301 s"
        assert health.describe_hang(0.0) == ""
    assert health.describe_hang(20.0) == health.describe_unanswered_wait() == ""


def test_program_without_an_event_loop_does_not_hang() -> None:
    clock = ManualClock()
    health = ProcessHealth(clock)
    clock.advance(1000.0)
    assert health.describe_hang(20.0) == ""


def test_slow_load_with_progress_is_no_hang() -> None:
    health, clock = begun()
    for done in range(100):
        health.record_load_progress("weights", done, 100)
        clock.advance(MAX_LOAD_STALL_SECONDS)
        health.record_heartbeat()
        assert health.describe_hang(20.0) == ""


def test_load_without_progress_is_a_hang() -> None:
    health, clock = begun()
    health.record_load_progress("weights", GIGABYTE, 16 * GIGABYTE)
    clock.advance(MAX_LOAD_STALL_SECONDS + 1)
    health.record_heartbeat()
    assert (
        health.describe_hang(20.0)
        == health.describe_stalled_load()
        == "weights: 1.00 of 16.00 GB: no progress for 121 s"
    )
    health.record_load_progress(
        "weights", GIGABYTE, 16 * GIGABYTE
    )  # no progress, but the load is still reporting
    assert health.describe_stalled_load() == ""


def test_time_after_a_load_is_not_bounded() -> None:
    """What follows the load (graph captures and grammar compilations, for example) reports no
    progress, so its time has no limit."""
    health, clock = begun()
    health.record_load_progress("weights", 16, 16)
    clock.advance(10 * MAX_LOAD_STALL_SECONDS)
    assert health.describe_stalled_load() == ""


def test_serving_program_can_not_stall_in_a_load() -> None:
    health, clock = begun()
    health.record_load_progress("weights", 1, 16)
    health.set_state("serving")
    clock.advance(10 * MAX_LOAD_STALL_SECONDS)
    assert health.describe_stalled_load() == ""
