"""Grammars that end whoever compiles them: a helper process ends, and nobody else."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from baton.concurrency.fair_slots import FairSlots
from baton.config import DEMO_MODEL
from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid, Overloaded, Unavailable
from baton.text.grammar import checker as grammar_checker
from baton.text.grammar.checker import GrammarChecker
from tests.grammar_house import regex, schema
from tests.unit.hostile_grammars import chained, lark
from tests.unit.test_router_http import eventually

ORDINARY = schema({"type": "object", "properties": {"a": {"type": "integer"}}})

CONJUNCTION = lark(
    "start: T\nT: " + " & ".join(f"/(.*{'abcdefghij'[i % 10]}.{{{i}}})?/" for i in range(20))
)
"""A third of a kilobyte that is read in a millisecond, and compiled for minutes."""


def rules(number: int, first: str = "") -> Grammar:
    links = "\n".join(f"r{each}: {first} r{each + 1}" for each in range(number))
    return lark(f'start: r0\n{links}\nr{number}: "a"')


HOSTILE = {
    "references": (schema(chained(lambda r: {"items": r}, 1000)), "nested too deeply"),
    "rules": (rules(2040), "nested too deeply"),
    "conjunction": (CONJUNCTION, r"more than 0\.5 s of processor time"),
    "alternatives": (
        lark("start: " + "|".join(['"b"'] * 12_000)),
        "its first token takes|of processor time",
    ),
    "nothing": (regex(r"[^\s\S]"), "no text fits it"),
    "itself": (schema({"$ref": "#"}), "no text fits it"),
    "many rules": (rules(2700), "at most 2048 rules"),
    "patterns": (
        schema({"patternProperties": {f"^{each:03}[a-z]*$": {} for each in range(400)}}),
        "at most 64 patternProperties",
    ),
}


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    """With the demo model's vocabulary."""
    made = GrammarChecker.of_model(DEMO_MODEL, 4096, [0])
    yield made
    made.close()


async def test_hostile_grammars_are_refused_with_a_reason(checker: GrammarChecker) -> None:
    for grammar, reason in HOSTILE.values():
        with pytest.raises(Invalid, match=reason):
            await checker.check(grammar, "mallory")
    await checker.check(ORDINARY, "alice")


async def test_a_helper_is_used_again(checker: GrammarChecker) -> None:
    checker.start()
    helper = checker._idle[0]
    for owner in ("alice", "bob", "alice"):
        await checker.check(ORDINARY, owner)
    assert checker._idle == [helper] and helper._num_jobs == 2  # what has passed is remembered


async def test_one_that_was_killed_is_replaced(checker: GrammarChecker) -> None:
    await checker.check(ORDINARY, "alice")
    process = checker._idle[0]._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    await checker.check(ORDINARY, "bob")
    assert checker._idle[0]._process is not process


async def test_a_helper_that_stands_still(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is not the grammar's doing."""
    await checker.check(ORDINARY, "alice")
    monkeypatch.setattr(grammar_checker, "WALL_SECONDS", 0.05)
    os.kill(checker._idle[0]._process.pid, signal.SIGSTOP)
    with pytest.raises(Unavailable, match="no verdict in time"):
        await checker.check(ORDINARY, "bob")
    assert checker._idle == []


async def test_whoever_leaves_takes_the_work_along(checker: GrammarChecker) -> None:
    checker.start()
    helper = checker._idle[0]
    asked = asyncio.create_task(checker.check(CONJUNCTION, "mallory"))
    await eventually(lambda: helper._num_jobs == 1)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert helper._process.wait(5) == -signal.SIGKILL
    await checker.check(ORDINARY, "mallory")


async def test_a_tokenizer_that_is_not_made_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizers.Tokenizer(models.Unigram()).to_str())
    checker = GrammarChecker.of_model(tmp_path, 10, [0])
    with pytest.raises(Invalid, match="can't be followed with this tokenizer"):
        await checker.check(ORDINARY, "alice")
    checker.close()


# -- turns ----------------------------------------------------------------------------------------


class Work:
    """What each owner does in its turn, in order; it lasts until it is released."""

    def __init__(self, slots: FairSlots) -> None:
        self._slots = slots
        self._release: dict[str, asyncio.Event] = {}
        self.began: list[str] = []

    def begin(self, name: str) -> "asyncio.Task[None]":
        return asyncio.create_task(self._work(name))

    async def end(self, name: str) -> None:
        self._release[name].set()
        for _ in range(5):
            await asyncio.sleep(0)

    async def _work(self, name: str) -> None:
        self._release[name] = asyncio.Event()
        async with self._slots.turn(name[0]):
            self.began.append(name)
            await self._release[name].wait()


async def test_nobody_takes_all_slots_and_owners_take_turns() -> None:
    work = Work(FairSlots(2, 16, "things"))
    tasks = [work.begin(name) for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert work.began == ["a1", "b1"]
    await work.end("a1")
    assert work.began == ["a1", "b1", "a2"]
    await work.end("b1")
    assert work.began == ["a1", "b1", "a2", "b2"]
    await work.end("a2")
    assert work.began[4:] == ["c1"]
    tasks[2].cancel()  # a3, while it waits
    for name in ("b2", "c1", "a4"):
        await work.end(name)
    await asyncio.wait(tasks)
    assert work.began[5:] == ["a4"] and work._slots.num_waiting == 0 and not work._slots._busy


async def test_a_line_of_waiters_has_an_end() -> None:
    slots = FairSlots(1, 8, "things")
    work = Work(slots)
    tasks = [work.begin(f"a{number}") for number in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="too many things wait"):
        await slots._take("a")
    others = [work.begin(f"{name}1") for name in "bcdefg"]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await slots._take("h")
    for task in (*tasks, *others):
        task.cancel()
    await asyncio.wait((*tasks, *others))
    assert slots.num_waiting == 0 and not slots._busy


def test_kinds_of_grammars_that_nobody_need_compile() -> None:
    checker = GrammarChecker()
    with pytest.raises(Invalid):
        asyncio.run(checker.check(Grammar(GrammarKind.LARK, "%llguidance {}"), "a"))
    assert checker._idle == []
    checker.close()
