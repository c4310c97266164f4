"""Tests that a hostile grammar kills only the helper process that compiles it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from baton.config import DEMO_MODEL
from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid, Unavailable
from baton.text.grammar import checker as grammar_checker
from baton.text.grammar.checker import GrammarChecker
from tests.byte_grammars import regex, schema
from tests.router_harness import eventually
from tests.unit.baton.text.grammar.hostile_grammars import chained, lark

ORDINARY = schema({"type": "object", "properties": {"a": {"type": "integer"}}})

CONJUNCTION = lark(
    "start: T\nT: " + " & ".join(f"/(.*{'abcdefghij'[i % 10]}.{{{i}}})?/" for i in range(20))
)
"""A grammar of a third of a kilobyte that is parsed in a millisecond, but takes minutes to
compile."""


def rules(number: int, first: str = "") -> Grammar:
    links = "\n".join(f"r{each}: {first} r{each + 1}" for each in range(number))
    return lark(f'start: r0\n{links}\nr{number}: "a"')


HOSTILE = {
    "references": (schema(chained(lambda r: {"items": r}, 1000)), "nested too deeply"),
    "rules": (rules(2040), "nested too deeply"),
    "conjunction": (CONJUNCTION, r"more than 0\.5 s of processor time"),
    "alternatives": (
        lark("start: " + "|".join(['"b"'] * 12_000)),
        "the first token's mask takes|of processor time",
    ),
    "nothing": (regex(r"[^\s\S]"), "no text matches it"),
    "itself": (schema({"$ref": "#"}), "no text matches it"),
    "many rules": (rules(2700), "at most 2048 rules"),
    "patterns": (
        schema({"patternProperties": {f"^{each:03}[a-z]*$": {} for each in range(400)}}),
        "at most 64 patternProperties",
    ),
}


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    """A grammar checker with the demo model's vocabulary."""
    made = GrammarChecker.for_model(DEMO_MODEL, 4096, [0])
    yield made
    made.close()


async def test_hostile_grammars_are_refused_with_a_reason(checker: GrammarChecker) -> None:
    for grammar, reason in HOSTILE.values():
        with pytest.raises(Invalid, match=reason):
            await checker.check(grammar, "mallory")
    await checker.check(ORDINARY, "alice")


async def test_helper_process_is_reused(checker: GrammarChecker) -> None:
    checker.start_helper()
    helper = checker._idle[0]
    for owner in ("alice", "bob", "alice"):
        await checker.check(ORDINARY, owner)
    assert checker._idle == [helper] and helper._num_jobs == 2  # alice's result was cached


async def test_killed_helper_is_replaced(checker: GrammarChecker) -> None:
    await checker.check(ORDINARY, "alice")
    process = checker._idle[0]._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    await checker.check(ORDINARY, "bob")
    assert checker._idle[0]._process is not process


async def test_stopped_helper_raises_unavailable(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the helper process is stopped by SIGSTOP, the check raises Unavailable instead of refusing
    the grammar."""
    await checker.check(ORDINARY, "alice")
    monkeypatch.setattr(grammar_checker, "VERDICT_TIMEOUT_SECONDS", 0.05)
    os.kill(checker._idle[0]._process.pid, signal.SIGSTOP)
    with pytest.raises(Unavailable, match="no verdict in time"):
        await checker.check(ORDINARY, "bob")
    assert checker._idle == []


async def test_cancelled_check_kills_its_helper(checker: GrammarChecker) -> None:
    checker.start_helper()
    helper = checker._idle[0]
    check = asyncio.create_task(checker.check(CONJUNCTION, "mallory"))
    await eventually(lambda: helper._num_jobs == 1)
    check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await check
    assert helper._process.wait(5) == -signal.SIGKILL
    await checker.check(ORDINARY, "mallory")


async def test_tokenizer_without_bytes_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizers.Tokenizer(models.Unigram()).to_str())
    checker = GrammarChecker.for_model(tmp_path, 10, [0])
    with pytest.raises(Invalid, match="can't be enforced with this tokenizer"):
        await checker.check(ORDINARY, "alice")
    checker.close()


def test_invalid_grammar_is_rejected_without_a_helper() -> None:
    checker = GrammarChecker()
    with pytest.raises(Invalid):
        asyncio.run(checker.check(Grammar(GrammarKind.LARK, "%llguidance {}"), "a"))
    assert checker._idle == []
    checker.close()
