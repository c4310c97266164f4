"""Process health: loading a model that makes progress is no hang, however long it takes."""

from baton.clock import ManualClock
from baton.serve.process_health import MAX_ANSWER_SECONDS, MAX_LOAD_STALL_SECONDS, ProcessHealth

GIGABYTE = 10**9


def begun() -> tuple[ProcessHealth, ManualClock]:
    clock = ManualClock()
    vitals = ProcessHealth(clock)
    vitals.start()
    return vitals, clock


def test_states_and_descriptions_of_a_program() -> None:
    vitals, _ = begun()
    assert (vitals.is_ready, vitals.has_served, vitals.describe()) == (False, False, "starting")
    vitals.record_load_progress("weights", 2 * GIGABYTE, 16 * GIGABYTE)
    assert vitals.describe() == "starting: weights: 2.00 of 16.00 GB"
    vitals.set_state("serving")
    assert (vitals.is_ready, vitals.has_served, vitals.describe()) == (True, True, "serving")
    vitals.set_state("draining")
    assert (vitals.is_ready, vitals.has_served, vitals.describe()) == (False, True, "draining")
    vitals.is_drained = True
    assert vitals.describe() == "drained"


def test_blocked_event_loop_is_a_hang() -> None:
    vitals, clock = begun()
    vitals.set_state("serving")
    clock.advance(20.0)
    assert vitals.describe_hang(20.0) == ""
    clock.advance(1.0)
    assert vitals.describe_hang(20.0) == "the event loop has stood still for 21 s"
    assert vitals.describe_hang(0.0) == ""  # no bound is set
    vitals.record_heartbeat()
    assert vitals.describe_hang(20.0) == ""


def test_thread_that_does_not_answer_is_a_hang() -> None:
    """Its event loop keeps running meanwhile."""
    vitals, clock = begun()
    vitals.set_state("serving")
    with vitals.waiting_for("the engine"):
        clock.advance(MAX_ANSWER_SECONDS)
        vitals.record_heartbeat()
        assert vitals.describe_hang(20.0) == vitals.describe_unanswered_wait() == ""
        clock.advance(1.0)
        assert vitals.describe_hang(20.0) == "the engine has not answered for 301 s"
        assert vitals.describe_hang(0.0) == ""
    assert vitals.describe_hang(20.0) == vitals.describe_unanswered_wait() == ""


def test_program_without_an_event_loop_does_not_hang() -> None:
    clock = ManualClock()
    vitals = ProcessHealth(clock)
    clock.advance(1000.0)
    assert vitals.describe_hang(20.0) == ""


def test_slow_load_with_progress_is_no_hang() -> None:
    vitals, clock = begun()
    for done in range(100):
        vitals.record_load_progress("weights", done, 100)
        clock.advance(MAX_LOAD_STALL_SECONDS)
        vitals.record_heartbeat()
        assert vitals.describe_hang(20.0) == ""


def test_load_without_progress_is_a_hang() -> None:
    vitals, clock = begun()
    vitals.record_load_progress("weights", GIGABYTE, 16 * GIGABYTE)
    clock.advance(MAX_LOAD_STALL_SECONDS + 1)
    vitals.record_heartbeat()
    assert (
        vitals.describe_hang(20.0)
        == vitals.describe_stalled_load()
        == "weights: 1.00 of 16.00 GB: no progress for 121 s"
    )
    vitals.record_load_progress(
        "weights", GIGABYTE, 16 * GIGABYTE
    )  # no progress, but the load is still reporting
    assert vitals.describe_stalled_load() == ""


def test_time_after_a_load_is_not_bounded() -> None:
    """Graph captures and grammar compilations, for example, report no progress."""
    vitals, clock = begun()
    vitals.record_load_progress("weights", 16, 16)
    clock.advance(10 * MAX_LOAD_STALL_SECONDS)
    assert vitals.describe_stalled_load() == ""


def test_serving_program_can_not_stall_in_a_load() -> None:
    vitals, clock = begun()
    vitals.record_load_progress("weights", 1, 16)
    vitals.set_state("serving")
    clock.advance(10 * MAX_LOAD_STALL_SECONDS)
    assert vitals.describe_stalled_load() == ""
