"""Fuzzes structured output with JSON schemas, regexes and Lark grammars that are nested, cyclic,
huge, random or mutated.

Each grammar is handled like one from a client: a helper process checks the grammar. If the helper
accepts it, this process compiles the grammar and generates some tokens that follow it, as a worker
does.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from baton.config import DEMO_MODEL
from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import TokenId
from baton.errors import BatonError, Invalid
from baton.text.grammar.checker import GrammarChecker
from baton.text.grammar.matcher import GrammarCompiler
from tests.fuzz.result import HANG_SECONDS, FuzzResult, Recorder

NAME = "grammars"

EOS = 0
VOCAB = 4096
NUM_TOKENS = 20
"""The number of tokens to generate with each grammar."""

Chance = np.random.Generator


def fuzz(seconds: float, seed: int) -> FuzzResult:
    return asyncio.run(_fuzz(seconds, seed))


async def _fuzz(seconds: float, seed: int) -> FuzzResult:
    chance, recorder = np.random.default_rng(seed), Recorder(NAME, seed)
    checker = GrammarChecker.for_model(Path(DEMO_MODEL), VOCAB, [EOS])
    grammars = GrammarCompiler.load(DEMO_MODEL, VOCAB, [TokenId(EOS)])
    until = monotonic() + seconds
    while monotonic() < until:
        grammar = make(chance)
        recorder.begin(f"{grammar.kind.value}: {grammar.text}")
        began_at = monotonic()
        try:
            await checker.check(grammar, "mallory")
            await asyncio.to_thread(follow, grammars, grammar, chance)
        except Invalid:
            pass
        except BatonError as error:
            recorder.server_error(repr(error))
        except BaseException as error:
            recorder.crash(repr(error))
        if monotonic() - began_at > HANG_SECONDS:
            recorder.hang(f"{monotonic() - began_at:.1f} s")
    checker.close()
    return recorder.result()


def follow(grammars: GrammarCompiler, grammar: Grammar, chance: Chance) -> None:
    """Generate random tokens that the grammar allows. Raises Invalid if the grammar can't be
    enforced."""
    matcher = grammars.create(grammar)
    for _ in range(NUM_TOKENS):
        bits = np.frombuffer(matcher.mask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little").nonzero()[0]
        if not len(allowed):
            assert matcher.error, "a matcher that allows no token must give a reason"
            return
        token_id = int(chance.choice(allowed))
        if token_id == EOS:
            return
        matcher.accept(TokenId(token_id))


# -- generators -----------------------------------------------------------------------------------


def make(chance: Chance) -> Grammar:
    makers: list[Callable[[Chance], Grammar]] = [a_schema, a_chain, a_pattern, a_lark, a_choice]
    grammar = makers[chance.integers(len(makers))](chance)
    if chance.random() < 0.3:
        return Grammar(grammar.kind, mutated(grammar.text, chance))
    return grammar


def size(chance: Chance, most: int) -> int:
    """Return a random number from 1 to ``most``: usually a small one, sometimes ``most`` itself."""
    return int(most ** (chance.random() ** 2)) if chance.random() < 0.9 else most


def a_schema(chance: Chance) -> Grammar:
    budget = [size(chance, 400)]
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema_part(chance, budget, 0)))


def schema_part(chance: Chance, budget: list[int], depth: int) -> Any:
    budget[0] -= 1

    def part() -> Any:
        return schema_part(chance, budget, depth + 1)

    if budget[0] <= 0 or depth > 70:
        return [{}, True, {"type": "integer"}, {"$ref": "#"}, {"enum": ["a", 1]}][
            chance.integers(5)
        ]
    few = range(int(chance.integers(1, 5)))
    number = int(chance.integers(-(10**6), 10**6))
    schemas: list[Callable[[], Any]] = [
        lambda: {"type": "object", "properties": {f"p{i}": part() for i in few}},
        lambda: {"properties": {f"p{i}": part() for i in few}, "required": ["p0", "zz"]},
        lambda: {"patternProperties": {pattern(chance, 3): part() for _ in few}},
        lambda: {"patternProperties": {f"^{i}[a-z]*$": {} for i in range(size(chance, 100))}},
        lambda: {"additionalProperties": part()},
        lambda: {"type": "array", "items": part(), "minItems": size(chance, 10**5)},
        lambda: {"prefixItems": [part() for _ in few], "items": part()},
        lambda: {"anyOf": [part() for _ in few]},
        lambda: {"allOf": [part() for _ in few]},
        lambda: {"oneOf": [part() for _ in few]},
        lambda: {"not": part()},
        lambda: {"if": part(), "then": part(), "else": part()},
        lambda: {"type": "string", "pattern": pattern(chance, 4), "maxLength": abs(number)},
        lambda: {
            "type": "string",
            "format": ["date-time", "email", "uri", "uuid", "x"][number % 5],
        },
        lambda: {"type": "integer", "minimum": number, "multipleOf": abs(number) + 1},
        lambda: {"type": "number", "exclusiveMaximum": number / 7},
        lambda: {"enum": [f"v{i}" for i in range(size(chance, 3000))]},
        lambda: {"const": "x" * size(chance, 50_000)},
        lambda: {"$defs": {"a": part()}, "$ref": "#/$defs/a"},
        lambda: {"$ref": ["#", "#/properties/p0", "#/$defs/a", "http://a/b", "#/x"][number % 5]},
        lambda: {"type": ["object", "array", "null", "string"], "minProperties": number % 9},
        lambda: [True, False, None, 5, []][number % 5],
    ]
    return schemas[chance.integers(len(schemas))]()


def a_chain(chance: Chance) -> Grammar:
    """Return a schema in which each definition refers to the next one; the last may close a
    cycle."""
    links: list[Callable[[Any], Any]] = [
        lambda r: r,
        lambda r: {"items": r},
        lambda r: {"properties": {"a": r}},
        lambda r: {"anyOf": [r, r]},
        lambda r: {"allOf": [r, {"type": "object"}]},
        lambda r: {"oneOf": [r, {"type": "null"}]},
        lambda r: {"additionalProperties": r},
    ]
    link, length = links[chance.integers(len(links))], size(chance, 1500)
    last = {"$ref": "#/$defs/d0"} if chance.random() < 0.3 else {"type": "integer"}
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    chain = {"$defs": {**definitions, f"d{length}": last}, "$ref": "#/$defs/d0"}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(chain))


ATOMS = (
    "a",
    "[a-z]",
    ".",
    r"\d",
    r"\w",
    r"\s",
    r"\pL",
    "[^x]",
    r"\.",
    "é",
    r"[^\s\S]",
    "(?i)b",
    "^$",
)
REPEATS = ("", "", "?", "*", "+", "{3}", "{2,}", "{1,50}", "{1000}", "{0,100000}")


def a_pattern(chance: Chance) -> Grammar:
    return Grammar(GrammarKind.REGEX, pattern(chance, size(chance, 2000)))


def pattern(chance: Chance, length: int) -> str:
    parts: list[str] = []
    for _ in range(max(length, 1)):
        atom = ATOMS[chance.integers(len(ATOMS))]
        if parts and chance.random() < 0.2:
            joined = "".join(parts[-3:])
            del parts[-3:]
            atom = f"({joined})" if chance.random() < 0.5 else f"({joined}|{atom})"
        parts.append(atom + REPEATS[chance.integers(len(REPEATS))])
        if sum(map(len, parts)) > 60_000:
            break
    return "".join(parts)


def a_lark(chance: Chance) -> Grammar:
    """Return a Lark grammar whose rules refer to the next rule, to any rule, or to themselves."""
    length = size(chance, 2500)
    rules, terminals = [], []
    for number in range(length):
        other = int(chance.integers(length)) if chance.random() < 0.2 else min(number + 1, length)
        ends = (
            f"r{other}", f'"b" r{other}', f"r{other} r{other}", f'r{other} | "c"', f"[r{other}]",
            f"r{other}{{2,9}}", f"T{other}", f'("d" r{other})*', f"/{pattern(chance, 2)}/ r{other}",
        )  # fmt: skip
        rules.append(f"r{number}: {ends[chance.integers(len(ends) if length < 200 else 3)]}")
        if length < 200:
            tail = (
                f'"b" T{other}',
                f"T{other} & /[a-m]+/",
                f"~T{other}",
                f"/{pattern(chance, 2)}/",
            )
            terminals.append(f"T{number}: {tail[chance.integers(len(tail))]}")
    lines = ["start: r0", *rules, f'r{length}: "a"', *terminals, f'T{length}: "a"']
    return Grammar(GrammarKind.LARK, "\n".join(lines))


def a_choice(chance: Chance) -> Grammar:
    texts = [pattern(chance, 2) for _ in range(size(chance, 2100))]
    return Grammar(GrammarKind.CHOICE, json.dumps(texts))


def mutated(text: str, chance: Chance) -> str:
    """Double, drop, reverse or repeat parts of a text, or replace them with special characters."""
    special = (
        '"',
        "{",
        "}",
        "(",
        ")",
        "|",
        "\\",
        "$ref",
        "%json {}",
        "%regex",
        "~",
        "&",
        "\0",
        "\ud800",
    )
    for _ in range(int(chance.integers(1, 6))):
        at = int(chance.integers(len(text) + 1))
        length = size(chance, 200)
        part = text[at : at + length]
        new = [
            "", part * 2, part * size(chance, 50), part[::-1],
            special[chance.integers(len(special))] * size(chance, 3000),
        ][chance.integers(5)]  # fmt: skip
        text = (text[:at] + new + text[at + length :])[:70_000]
    return text
