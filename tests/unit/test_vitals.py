"""A load that moves is no hang, however long it takes."""

from baton.clock import ManualClock
from baton.serve.process_health import ANSWER_SECONDS, STALL_SECONDS, ProcessHealth

GIGABYTE = 10**9


def begun() -> tuple[ProcessHealth, ManualClock]:
    clock = ManualClock()
    vitals = ProcessHealth(clock)
    vitals.begin()
    return vitals, clock


def test_a_life() -> None:
    vitals, _ = begun()
    assert (vitals.ready, vitals.has_served, vitals.describe()) == (False, False, "starting")
    vitals.load("weights", 2 * GIGABYTE, 16 * GIGABYTE)
    assert vitals.describe() == "starting: weights: 2.00 of 16.00 GB"
    vitals.move("serving")
    assert (vitals.ready, vitals.has_served, vitals.describe()) == (True, True, "serving")
    vitals.move("draining")
    assert (vitals.ready, vitals.has_served, vitals.describe()) == (False, True, "draining")
    vitals.drained = True
    assert vitals.describe() == "drained"


def test_an_event_loop_that_stands_still() -> None:
    vitals, clock = begun()
    vitals.move("serving")
    clock.advance(20.0)
    assert vitals.hang(20.0) == ""
    clock.advance(1.0)
    assert vitals.hang(20.0) == "the event loop has stood still for 21 s"
    assert vitals.hang(0.0) == ""  # it has no bound
    vitals.beat()
    assert vitals.hang(20.0) == ""


def test_a_thread_that_does_not_answer() -> None:
    """Its event loop is well meanwhile."""
    vitals, clock = begun()
    vitals.move("serving")
    with vitals.waiting("the engine"):
        clock.advance(ANSWER_SECONDS)
        vitals.beat()
        assert vitals.hang(20.0) == vitals.silence() == ""
        clock.advance(1.0)
        assert vitals.hang(20.0) == "the engine has not answered for 301 s"
        assert vitals.hang(0.0) == ""
    assert vitals.hang(20.0) == vitals.silence() == ""


def test_before_its_event_loop_runs_nothing_hangs() -> None:
    clock = ManualClock()
    vitals = ProcessHealth(clock)
    clock.advance(1000.0)
    assert vitals.hang(20.0) == ""


def test_a_load_of_hours_that_moves() -> None:
    vitals, clock = begun()
    for done in range(100):
        vitals.load("weights", done, 100)
        clock.advance(STALL_SECONDS)
        vitals.beat()
        assert vitals.hang(20.0) == ""


def test_a_load_that_stands_still() -> None:
    vitals, clock = begun()
    vitals.load("weights", GIGABYTE, 16 * GIGABYTE)
    clock.advance(STALL_SECONDS + 1)
    vitals.beat()
    assert vitals.hang(20.0) == vitals.stall() == "weights: 1.00 of 16.00 GB: no progress for 121 s"
    vitals.load("weights", GIGABYTE, 16 * GIGABYTE)  # the same, but somebody is at it
    assert vitals.stall() == ""


def test_what_comes_after_a_load_has_no_bound() -> None:
    """A graph is captured, a grammar compiled: nobody says how far that is."""
    vitals, clock = begun()
    vitals.load("weights", 16, 16)
    clock.advance(10 * STALL_SECONDS)
    assert vitals.stall() == ""


def test_who_has_served_loads_no_more() -> None:
    vitals, clock = begun()
    vitals.load("weights", 1, 16)
    vitals.move("serving")
    clock.advance(10 * STALL_SECONDS)
    assert vitals.stall() == ""
