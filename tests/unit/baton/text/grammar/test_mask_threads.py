"""Tests that an answer whose grammar mask takes too long fails alone, and that no other answer
waits for its thread."""

import threading

import pytest

from baton.core.ids import TokenId
from baton.errors import Invalid
from baton.text.grammar import mask_threads
from baton.text.grammar.mask_threads import MaskThreadPool, MaskTimeout
from baton.text.grammar.matcher import GrammarCompiler
from tests.byte_grammars import byte_grammars, choice, generate_all, grammar_request, regex


class Spinning:
    """A mask computation that uses processor time until ``is_running`` is false."""

    def __init__(self) -> None:
        self.is_running = True
        self.ended = threading.Event()

    def __call__(self) -> bytes:
        while self.is_running:
            pass
        self.ended.set()
        return b"late"


def test_spinning_thread_is_abandoned_and_replaced() -> None:
    threads = MaskThreadPool(1)
    spinning = Spinning()
    slow, behind = threads.submit(spinning), threads.submit(lambda: b"mask")
    assert behind.result() == b"mask"
    with pytest.raises(MaskTimeout, match="of CPU time"):
        slow.result()
    given_up = threads._abandoned[0]
    spinning.is_running = False
    assert spinning.ended.wait(5)
    given_up._thread.join(5)
    assert not given_up.is_alive()
    with pytest.raises(MaskTimeout):
        slow.result()
    assert threads.submit(lambda: b"next").result() == b"next"


def test_sleeping_thread_is_waited_for_up_to_the_wall_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that uses no CPU time may only be waiting for a processor. It does not reach the CPU
    time limit, and is waited for until the wall-clock limit."""
    monkeypatch.setattr(mask_threads, "MASK_CPU_SECONDS", 0.01)
    threads, awake = MaskThreadPool(1), threading.Event()
    job = threads.submit(lambda: b"mask" if awake.wait(10) else b"")
    threading.Timer(0.05, awake.set).start()
    assert job.result() == b"mask"
    monkeypatch.setattr(mask_threads, "MASK_TIMEOUT_SECONDS", 0.05)
    awake.clear()
    asleep = threads.submit(lambda: b"mask" if awake.wait(10) else b"")
    with pytest.raises(MaskTimeout, match="it took more than"):
        asleep.result()
    awake.set()


def test_panic_fails_only_its_own_job() -> None:
    class Panic(BaseException):
        pass

    def panic() -> bytes:
        raise Panic

    threads = MaskThreadPool(1)
    with pytest.raises(Panic):
        threads.submit(panic).result()
    assert threads.submit(lambda: b"next").result() == b"next"


def test_number_of_abandoned_threads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_threads, "MAX_ABANDONED_THREADS", 1)
    monkeypatch.setattr(mask_threads, "MASK_CPU_SECONDS", 0.001)
    threads, spinning = MaskThreadPool(1), Spinning()
    jobs = [threads.submit(spinning) for _ in range(2)]
    for job in jobs:
        with pytest.raises(MaskTimeout):
            job.result()
    threads.abandon_slow_threads()
    assert len(threads._abandoned) == 1
    spinning.is_running = False


@pytest.fixture
def grammars() -> GrammarCompiler:
    return byte_grammars()


def test_answer_with_a_slow_mask_fails_alone(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a mask of a grammar has taken too long, new requests by the same owner with this
    grammar are refused; those by other owners are not."""
    slow, spinning = regex("[ab]{100}"), Spinning()
    opened = grammars.create

    def open_slow(*arguments: object) -> object:
        constraint = opened(*arguments)  # type: ignore[arg-type]
        if constraint._grammar == slow:
            monkeypatch.setattr(constraint, "_advance", lambda _: spinning())
        return constraint

    monkeypatch.setattr(grammars, "create", open_slow)
    specs = [grammar_request("slow", slow, 1), grammar_request("good", choice("yes"), 1)]
    answers = generate_all(grammars, specs)
    spinning.is_running = False
    assert len(answers["slow"][0]) == 1 and answers["slow"][1] == "error"
    assert answers["good"] == (b"yes", "stop")
    with pytest.raises(Invalid, match="token's mask: it took more than"):
        opened(slow)
    opened(slow, owner=b"somebody else").accept(TokenId(ord("a")))


def test_owners_share_no_grammar_states(grammars: GrammarCompiler) -> None:
    """If states were shared, response times would show whether another owner has used the same
    grammar."""
    for owner in (b"alice", b"bob", b"alice"):
        grammars.create(choice("yes"), owner=owner)
    assert list(grammars._compiled) == [(b"bob", choice("yes")), (b"alice", choice("yes"))]
