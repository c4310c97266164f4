"""Compiles grammars designed to exhaust memory or time, and generates some tokens with each one
that is accepted."""

import resource
from typing import Any

import numpy as np

from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import TokenId
from baton.errors import Invalid
from baton.text.grammar.compilation import validate_grammar
from tests.byte_grammars import EOS, byte_grammars, choice, regex, schema

MAX_GROWTH_MIB = 700


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    return value


def chained(link: Any, length: int) -> dict[str, Any]:
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$defs": {**definitions, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


def doubled(name: str, length: int) -> str:
    rules = [f"{name}{i}: {name}{i + 1} {name}{i + 1}" for i in range(length)]
    return "\n".join([f"start: {name}0", *rules, f'{name}{length}: "a"'])


HOSTILE = {
    "long repeat": regex("a{1,100000}"),
    "what can come one way only": regex("(abc){100000000}"),
    "repeats of repeats": regex("((a{1,100}){1,100}){1,100}"),
    "repeats of classes": regex(r"(\w|\pL){1,1000}x{1000}"),
    "nested stars": regex("(a|a?)+" * 50),
    "exponential states": regex("(a|b)*a(a|b){400}"),
    "many exponential states": regex("|".join(f".*{c}.{{20}}" for c in "abcdefghij")),
    "deep groups": regex("(" * 5000 + "a" + ")" * 5000),
    "many alternatives": regex("|".join(f"x{i}" for i in range(8000))),
    "deep objects": schema(nested(28)),
    "10,000 objects deep": Grammar(
        GrammarKind.JSON_SCHEMA, '{"items":' * 7000 + "{}" + "}" * 7000
    ),
    "itself": schema({"$ref": "#"}),
    "references that double": schema(chained(lambda r: {"anyOf": [r, r]}, 40)),
    "objects that double": schema(
        chained(lambda r: {"type": "object", "properties": {"a": r, "b": r}}, 40)
    ),
    "conjunctions that double": schema(chained(lambda r: {"allOf": [r, r]}, 25)),
    "products of alternatives": schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]}
                   for i in range(12)]}
    ),
    "giant enum": schema({"enum": [f"v{i}" for i in range(5000)]}),
    "giant constant": schema({"const": "x" * 60_000}),
    "giant list": schema({"type": "array", "items": {"const": "abc"}, "minItems": 100_000}),
    "long text": schema({"type": "string", "minLength": 100_000, "maxLength": 1_000_000}),
    "many properties": schema({"type": "object", "properties": {f"p{i}": {} for i in range(2500)}}),
    "odd multiples": schema({"type": "integer", "multipleOf": 99991}),
    "huge range": schema({"type": "integer", "minimum": -(10**300), "maximum": 10**300}),
    "many ranges": schema(
        {"type": "array",
         "prefixItems": [{"type": "number", "minimum": i + 0.123456789} for i in range(500)]}
    ),
    "hostile patterns": schema(
        {"type": "object",
         "patternProperties": {f"^{c}.*x{{100}}$": {"type": "integer"} for c in "abcdefghij"}}
    ),
    "pattern and length": schema({"type": "string", "pattern": "(.*a.{20}){3}", "minLength": 50}),
    "ambiguous": lark('start: start start | "a" | '),
    "very ambiguous": lark('start: a a a a a a a a\na: a a | "x" | '),
    "rules that double": lark(doubled("r", 60)),
    "terminals that double": lark(doubled("R", 40)),
    "repeated rules": lark('start: a{1,100000}\na: "x" b{1,1000}\nb: "y"{1,1000}'),
    "repeated terminals": lark("start: /x{500}/{3000}"),
    "many choices": choice(*(f"word number {i}" for i in range(2000))),
}  # fmt: skip


def main() -> None:
    grammars, before = byte_grammars(), _peak_mib()
    for name, grammar in HOSTILE.items():
        try:
            validate_grammar(grammar)
            print(f"{name}: followed for {_follow(grammars.create(grammar))} tokens")
        except Invalid as error:
            print(f"{name}: {str(error)[:100]!r}")
        growth = _peak_mib() - before
        assert growth < MAX_GROWTH_MIB, f"{name}: {growth} MiB"
    print(f"all of {len(HOSTILE)}, with {_peak_mib() - before} MiB")


def _follow(constraint: Any) -> int:
    chance = np.random.default_rng(1)
    for count in range(100):
        bits = np.unpackbits(
            np.frombuffer(constraint.mask(), np.uint8), bitorder="little"
        ).nonzero()[0]
        if not len(bits) or (token_id := int(chance.choice(bits))) == EOS:
            return count
        constraint.accept(TokenId(token_id))
    return 100


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    main()
