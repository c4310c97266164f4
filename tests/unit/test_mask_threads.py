"""Masks that take too long: their answer ends, and nobody waits for their thread."""

import threading

import pytest

from baton.core.ids import TokenId
from baton.errors import Invalid
from baton.text.grammar import mask_threads
from baton.text.grammar.mask_threads import MaskThreadPool, MaskTimeout
from baton.text.grammar.matcher import GrammarCompiler
from tests.grammar_house import answers, asking, byte_grammars, choice, regex


class Spinning:
    """Takes processor time until it is let go."""

    def __init__(self) -> None:
        self.goes = True
        self.ended = threading.Event()

    def __call__(self) -> bytes:
        while self.goes:
            pass
        self.ended.set()
        return b"late"


def test_one_that_spins_is_given_up_and_replaced() -> None:
    threads = MaskThreadPool(1)
    spinning = Spinning()
    slow, behind = threads.submit(spinning), threads.submit(lambda: b"mask")
    assert behind.result() == b"mask"
    with pytest.raises(MaskTimeout, match="of a processor"):
        slow.result()
    given_up = threads._given_up[0]
    spinning.goes = False
    assert spinning.ended.wait(5)
    given_up._thread.join(5)
    assert not given_up.is_alive()
    with pytest.raises(MaskTimeout):
        slow.result()
    assert threads.submit(lambda: b"next").result() == b"next"


def test_one_that_sleeps_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processors may be somebody else's; but not for ever."""
    monkeypatch.setattr(mask_threads, "MASK_SECONDS", 0.0001)
    threads, awake = MaskThreadPool(1), threading.Event()
    job = threads.submit(lambda: b"mask" if awake.wait(10) else b"")
    threading.Timer(0.05, awake.set).start()
    assert job.result() == b"mask"
    monkeypatch.setattr(mask_threads, "WALL_SECONDS", 0.05)
    awake.clear()
    asleep = threads.submit(lambda: b"mask" if awake.wait(10) else b"")
    with pytest.raises(MaskTimeout, match="it took more than"):
        asleep.result()
    awake.set()


def test_a_panic_is_its_own_job_s() -> None:
    class Panic(BaseException):
        pass

    def panic() -> bytes:
        raise Panic

    threads = MaskThreadPool(1)
    with pytest.raises(Panic):
        threads.submit(panic).result()
    assert threads.submit(lambda: b"next").result() == b"next"


def test_only_so_many_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_threads, "MAX_ABANDONED", 1)
    monkeypatch.setattr(mask_threads, "MASK_SECONDS", 0.001)
    threads, spinning = MaskThreadPool(1), Spinning()
    jobs = [threads.submit(spinning) for _ in range(2)]
    for job in jobs:
        with pytest.raises(MaskTimeout):
            job.result()
    threads.give_up_slow()
    assert len(threads._given_up) == 1
    spinning.goes = False


@pytest.fixture
def grammars() -> GrammarCompiler:
    return byte_grammars()


def test_an_answer_whose_mask_is_too_slow_ends_alone(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its grammar is refused from then on, to its owner."""
    slow, spinning = regex("[ab]{100}"), Spinning()
    opened = grammars.open

    def open_slow(*arguments: object) -> object:
        walk = opened(*arguments)  # type: ignore[arg-type]
        if walk._grammar == slow:
            monkeypatch.setattr(walk, "_advance", lambda _: spinning())
        return walk

    monkeypatch.setattr(grammars, "open", open_slow)
    specs = [asking("slow", slow, 1), asking("good", choice("yes"), 1)]
    seen = answers(grammars, specs)
    spinning.goes = False
    assert len(seen["slow"][0]) == 1 and seen["slow"][1] == "error"
    assert seen["good"] == (b"yes", "stop")
    with pytest.raises(Invalid, match="for one token it took more than"):
        opened(slow)
    opened(slow, owner=b"somebody else").accept(TokenId(ord("a")))


def test_owners_share_no_states(grammars: GrammarCompiler) -> None:
    """What one has found out about a grammar would tell the other by the time it takes."""
    for owner in (b"alice", b"bob", b"alice"):
        grammars.open(choice("yes"), owner=owner)
    assert list(grammars._compiled) == [(b"bob", choice("yes")), (b"alice", choice("yes"))]
