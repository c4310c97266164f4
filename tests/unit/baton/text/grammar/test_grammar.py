"""Tests structured output: a grammar's masks equal those computed from a list of all texts that the
grammar allows, and invalid grammars are refused."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from baton.clock import ManualClock
from baton.config import DEMO_MODEL
from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import TokenId
from baton.core.request import PROMPT_PREFILLED, FinishReason
from baton.core.task import Task
from baton.engine.engine import Engine
from baton.errors import Invalid
from baton.text.grammar import compilation as compiling
from baton.text.grammar import matcher as limits
from baton.text.grammar.matcher import GrammarCompiler
from baton.text.tokenizer import Tokenizer
from testkit.fakes.runner import FakeRunner
from tests.byte_grammars import (
    CONFIG,
    EOS,
    VOCAB,
    byte_grammars,
    byte_vocabulary,
    choice,
    generate_all,
    grammar_request,
    regex,
    schema,
)

SEED = 20261121
TEXTS = ("red", "reddish", "green", "grün", "re/d\n", '"\\', "green tea", "😀")


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return byte_grammars()


def allowed(bits: bytes) -> list[int]:
    flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
    return [int(index) for index in flags.nonzero()[0]]


def test_masks_equal_a_list_of_all_texts() -> None:
    """The vocabulary is a real one, whose tokens are parts of words and of characters."""
    tokenizer = Tokenizer.load(DEMO_MODEL)
    eos = 0
    vocab_size = tokenizer.vocab_size + 5
    grammars = GrammarCompiler.load(DEMO_MODEL, vocab_size, [TokenId(eos)])
    whole = [text.encode() for text in TEXTS]
    pieces = {
        token_id: tokenizer.token_bytes(token_id)
        for token_id in range(tokenizer.vocab_size)
        if not tokenizer.is_hidden(token_id)
    }
    chance = np.random.default_rng(SEED)
    for _ in range(20):
        constraint, text_so_far = grammars.create(choice(*TEXTS)), b""
        while True:
            fits = [
                token_id
                for token_id, piece in pieces.items()
                if piece and any(text.startswith(text_so_far + piece) for text in whole)
            ]
            expected = sorted([eos] * (text_so_far in whole) + fits)
            assert allowed(constraint.mask()) == expected
            token_id = TokenId(int(chance.choice(expected)))
            if token_id == eos:
                break
            constraint.accept(token_id)
            text_so_far += pieces[token_id]


@pytest.mark.parametrize(
    "pattern", ["[a-c]{2,5}", r"\d{3}-(x|yz)+!", "(?i)ab", "a/b|c", "^[0-9]$", "é+\n?", r"\\\."]
)
def test_answers_match_their_pattern(grammars: GrammarCompiler, pattern: str) -> None:
    specs = [grammar_request(str(seed), regex(pattern), seed) for seed in range(20)]
    for text, reason in generate_all(grammars, specs).values():
        assert reason is FinishReason.STOP
        assert re.fullmatch(pattern, text.decode()), text


def test_answers_are_one_of_the_choices(grammars: GrammarCompiler) -> None:
    specs = [grammar_request(str(seed), choice(*TEXTS), seed) for seed in range(60)]
    answers = generate_all(grammars, specs)
    assert {text.decode() for text, _ in answers.values()} == set(TEXTS)
    assert {reason for _, reason in answers.values()} == {FinishReason.STOP}


def test_lark_grammars_are_followed(grammars: GrammarCompiler) -> None:
    lark = Grammar(GrammarKind.LARK, 'start: "<" item+ ">"\nitem: /[ab]/ | "(" item ")"')
    specs = [grammar_request(str(seed), lark, seed, max_tokens=60) for seed in range(10)]
    for text, reason in generate_all(grammars, specs).values():
        assert text.startswith(b"<") and text.count(b"(") - text.count(b")") >= 0
        assert (reason is FinishReason.STOP) == text.endswith(b">")


def test_json_object_may_be_truncated_at_max_tokens(grammars: GrammarCompiler) -> None:
    specs = [
        grammar_request(str(seed), Grammar(GrammarKind.JSON_OBJECT), seed, 60) for seed in range(20)
    ]
    reasons = set()
    for text, reason in generate_all(grammars, specs).values():
        reasons.add(reason)
        assert text.startswith(b"{")
        if reason is FinishReason.STOP:
            assert isinstance(json.loads(text), dict)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_only_eos_is_allowed_at_the_end_of_the_grammar(grammars: GrammarCompiler) -> None:
    constraint = grammars.create(regex("ab?"), [TokenId(ord("a"))])
    assert allowed(constraint.mask()) == [ord("b"), EOS]
    constraint.accept(TokenId(ord("b")))
    assert allowed(constraint.mask()) == [EOS]


def test_token_ids_beyond_the_tokenizer_are_never_allowed() -> None:
    larger = GrammarCompiler(byte_vocabulary(), VOCAB + 50, [EOS])
    anything = regex("(?s:.)+")
    assert max(allowed(larger.create(anything).mask())) < VOCAB


def test_answer_that_violates_its_grammar_is_refused(grammars: GrammarCompiler) -> None:
    with pytest.raises(Invalid, match="can't be enforced any further"):
        grammars.create(regex("ab"), [TokenId(ord("x"))])


def test_token_outside_the_grammar_ends_the_walk_with_an_error(grammars: GrammarCompiler) -> None:
    constraint = grammars.create(regex("ab"))
    constraint.accept(TokenId(ord("x")))
    assert constraint.mask() == b""
    assert "can't be enforced any further" in constraint.error


def test_state_limit_applies_to_each_answer_separately(grammars: GrammarCompiler) -> None:
    """The pattern has more states than one grammar may have; each answer visits only some of
    them."""
    greedy = regex("|".join(f".*{letter}.{{20}}" for letter in "abcdefghij"))
    chance = np.random.default_rng(SEED)
    token_paths = [chance.integers(97, 107, size=45).tolist() for _ in range(6)]
    masks = []
    for token_path in (*token_paths, *token_paths):
        constraint = grammars.create(greedy)
        own_masks = []
        for token_id in token_path:
            own_masks.append(constraint.mask())
            assert own_masks[-1], constraint.error
            constraint.accept(TokenId(token_id))
        masks.append(own_masks)
    assert masks[:6] == masks[6:]


def test_number_of_cached_grammars_is_bounded(grammars: GrammarCompiler) -> None:
    for number in range(3 * limits.MAX_COMPILED):
        grammars.create(regex(f"a{{{number + 1}}}"))
    assert len(grammars._compiled) == limits.MAX_COMPILED


def test_grammars_that_nobody_uses_are_dropped() -> None:
    clock = ManualClock()
    compiler = GrammarCompiler(byte_vocabulary(), VOCAB, [EOS], clock)
    compiler.create(regex("a"))
    matcher = compiler.create(regex("b"))
    clock.advance(20)
    compiler.create(regex("a"))
    clock.advance(20)
    assert compiler.drop_unused(30) == 1
    assert [grammar for _, grammar in compiler._compiled] == [regex("a")]
    assert allowed(matcher.mask()) == [ord("b")]


@pytest.mark.parametrize("kind", [models.WordLevel({"a": 0, "u": 1}, "u"), models.Unigram()])
def test_tokenizer_without_bytes_is_rejected(kind: models.Model) -> None:
    with pytest.raises(Invalid, match="can't be enforced with this tokenizer"):
        GrammarCompiler(tokenizers.Tokenizer(kind).to_str(), 10, [TokenId(0)])


UNFOLLOWABLE = [
    regex(""),
    regex("a\\"),
    regex("("),
    regex(r"(a)\1"),
    regex("a" * 70_000),
    regex("\ud800"),
    schema([]),
    schema(False),
    schema({"x-guidance": {}}),
    schema({"type": "integr"}),
    schema({"minimum": 5, "maximum": 2, "type": "integer"}),
    schema({"type": "array", "uniqueItems": True}),
    schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    schema({"$ref": "file:///etc/hostname"}),
    schema({"$schema": "http://127.0.0.1:9/x"}),
    Grammar(GrammarKind.JSON_SCHEMA, "{"),
    Grammar(GrammarKind.JSON_SCHEMA, "[" * 50_000),
    Grammar(GrammarKind.JSON_SCHEMA, '{"enum":[NaN]}'),
    Grammar(GrammarKind.CHOICE, "3"),
    choice(),
    choice(""),
    choice(*map(str, range(5000))),
    Grammar(GrammarKind.LARK, ""),
    Grammar(GrammarKind.LARK, "start: a"),
    Grammar(GrammarKind.LARK, "start: A\nA: B\nB: A"),
    Grammar(GrammarKind.LARK, 'start: "a"\n%llguidance {}'),
    Grammar(GrammarKind.LARK, "start: " + "(" * 3000 + '"a"' + ")" * 3000),
]


@pytest.mark.parametrize("unfollowable", UNFOLLOWABLE, ids=range(len(UNFOLLOWABLE)))
def test_unusable_grammars_are_refused_at_once(
    grammars: GrammarCompiler, unfollowable: Grammar
) -> None:
    with pytest.raises(Invalid) as refusal:
        compiling.validate_grammar(unfollowable)
    assert 0 < len(str(refusal.value)) <= compiling.MAX_MESSAGE_CHARACTERS
    with pytest.raises(Invalid):
        grammars.create(unfollowable)


def test_grammar_that_allows_nothing_fails_only_its_request(grammars: GrammarCompiler) -> None:
    """The grammar compiles, but no text matches it."""
    specs = [
        grammar_request("barren", schema({"$ref": "#"}), 1),
        grammar_request("good", choice("yes"), 1),
    ]
    answers = generate_all(grammars, specs)
    assert answers["barren"] == (b"", FinishReason.ERROR)
    assert answers["good"] == (b"yes", FinishReason.STOP)


def test_grammar_failure_reports_that_the_prompt_was_computed(grammars: GrammarCompiler) -> None:
    engine = Engine(
        FakeRunner(64, CONFIG.block_tokens, VOCAB),
        CONFIG,
        model_digest=b"model",
        kv_dtype="fake",
        eos_token_ids=frozenset({EOS}),
        clock=ManualClock(),
    )
    barren = schema({"$ref": "#"})
    engine.add(grammar_request("r", barren, 1), Task.PREFILL_AND_DECODE, grammars.create(barren))
    (output,) = engine.step().outputs
    assert output.finish_reason is FinishReason.ERROR and PROMPT_PREFILLED in output.details


def test_hostile_grammars_take_bounded_memory() -> None:
    """One process with 2 GiB of address space compiles all hostile grammars, one after the other:
    it refuses each, or chooses up to 100 tokens that the grammar allows."""
    command = [sys.executable, "-m", "tests.unit.baton.text.grammar.hostile_grammars"]
    folder = Path(__file__).parents[5]

    def confine() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))

    done = subprocess.run(
        command, cwd=folder, preexec_fn=confine, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("all ")
    print(done.stdout)
