"""Tests allowed tokens and banned sequences (``allowed_token_ids``, ``bad_words``)."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import TokenId
from baton.errors import Invalid
from baton.text.grammar.limits import MAX_ALLOWED_TOKENS, MAX_BANNED_TOKENS, MAX_GRAMMAR_BYTES
from baton.text.grammar.matcher import GrammarCompiler
from baton.text.grammar.token_rules import TokenRuleMatcher, TokenRules
from baton.text.tokenizer import Tokenizer
from router.openai.schema import CompletionBody
from router.serving.token_rules import token_rules_grammar
from tests import router_harness
from tests.byte_grammars import EOS, VOCAB, byte_grammars, generate_all, grammar_request
from tests.router_harness import CHAT, COMPLETE, chat, open_harness

tokenizer = router_harness.tokenizer


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return byte_grammars()


def ids(text: str) -> tuple[TokenId, ...]:
    return tuple(map(TokenId, text.encode()))


def rules(allowed: str | None, *banned: str) -> TokenRules:
    return TokenRules(None if allowed is None else ids(allowed), tuple(map(ids, banned)))


def allowed(bits: bytes) -> set[int]:
    return {i for i in range(8 * len(bits)) if bits[i // 8] >> i % 8 & 1}


def test_only_allowed_tokens_are_allowed() -> None:
    matcher = TokenRuleMatcher(rules("ab"), 300)
    assert allowed(matcher.mask()) == {97, 98}
    matcher.accept(TokenId(97))
    assert allowed(matcher.mask()) == {97, 98} and matcher.error == ""


def test_a_banned_sequence_can_begin_but_not_end() -> None:
    matcher = TokenRuleMatcher(rules("abc", "c", "aab"), 256, ids("xa"))
    assert allowed(matcher.mask()) == set(b"ab")
    matcher.accept(TokenId(97))
    assert allowed(matcher.mask()) == set(b"a")
    matcher.accept(TokenId(97))
    assert allowed(matcher.mask()) == set(b"a")
    matcher.accept(TokenId(98))
    assert allowed(matcher.mask()) == set(b"ab")


def test_rules_that_allow_nothing_are_an_error() -> None:
    matcher = TokenRuleMatcher(rules("a", "a"), 256)
    assert matcher.mask() == b"" and "allow no further token" in matcher.error


@given(
    some.lists(some.text("abc", min_size=1, max_size=4), max_size=6),
    some.text("abc", max_size=12),
    some.integers(0, 12),
)
def test_masks_equal_a_search_in_the_whole_answer(
    banned: list[str], answer: str, start: int
) -> None:
    """The matcher's state depends on the answer alone, even if another worker generated its first
    tokens."""
    matcher = TokenRuleMatcher(rules("abc", *banned), 256, ids(answer[:start]))
    for token_id in ids(answer[start:]):
        matcher.accept(token_id)
    expected = {
        ord(letter) for letter in "abc" if not any((answer + letter).endswith(b) for b in banned)
    }
    assert allowed(matcher.mask()) == expected


def test_answers_follow_their_rules(grammars: GrammarCompiler) -> None:
    grammar = rules("abcd", "ab", "d", "cbc").grammar
    requests = [grammar_request(f"r{seed}", grammar, seed, max_tokens=60) for seed in range(20)]
    continued = grammar_request("continued", grammar, 1, max_tokens=60, generated=b"cb")
    answers = generate_all(grammars, [*requests, continued])
    for name, (data, _) in answers.items():
        answer = (b"cb" if name == "continued" else b"") + data
        assert len(answer) == 60 and set(answer) <= set(b"abc")
        assert b"ab" not in answer and b"cbc" not in answer


def test_the_rules_of_a_request_are_bounded() -> None:
    largest = TokenRules(
        tuple(map(TokenId, range(200_000, 200_000 + MAX_ALLOWED_TOKENS))),
        tuple((TokenId(200_000 + i),) for i in range(MAX_BANNED_TOKENS)),
    )
    assert len(largest.grammar.text) < MAX_GRAMMAR_BYTES
    assert TokenRules.parse(largest.grammar.text) == largest


@pytest.mark.parametrize(
    "value",
    [
        "x", [], {}, {"allowed": None}, {"allowed": [], "banned": []},
        {"allowed": [-1], "banned": []}, {"allowed": [True], "banned": []},
        {"allowed": None, "banned": [[]]}, {"allowed": None, "banned": [5]},
        {"allowed": [1] * (MAX_ALLOWED_TOKENS + 1), "banned": []},
        {"allowed": None, "banned": [[1]] * (MAX_BANNED_TOKENS + 1)},
    ],
)  # fmt: skip
def test_malformed_rules_are_refused(value: Any) -> None:
    with pytest.raises(Invalid):
        TokenRules.parse(json.dumps(value))


def test_tokens_outside_of_the_vocabulary_are_refused(grammars: GrammarCompiler) -> None:
    grammar = Grammar(GrammarKind.TOKEN_RULES, f'{{"allowed":[{VOCAB}],"banned":[]}}')
    with pytest.raises(Invalid, match="below 256"):
        grammars.create(grammar)


# -- the router ------------------------------------------------------------------------------------


def test_bad_words_are_tokenised_at_the_beginning_and_after_a_space(tokenizer: Tokenizer) -> None:
    """Each byte is a token here, so a word's tokens are the same after a space as at the beginning
    of the answer, and are banned everywhere."""
    body = CompletionBody.model_validate({"prompt": "x", "bad_words": ["no", " hey"]})
    grammar = token_rules_grammar(body, tokenizer)
    assert grammar is not None
    assert TokenRules.parse(grammar.text) == rules(None, "no", "hey")


class SpacedTokenizer:
    """A tokenizer that encodes a word as one token, whose id differs if a space precedes the
    word."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [100 + len(text)] if text.startswith(" ") else [len(text)]


def test_a_word_after_a_space_is_banned_too() -> None:
    body = CompletionBody.model_validate({"prompt": "x", "bad_words": ["no"]})
    grammar = token_rules_grammar(body, SpacedTokenizer())  # type: ignore[arg-type]
    assert grammar is not None
    assert TokenRules.parse(grammar.text).banned == ((2,), (103,))


async def test_rules_reach_the_workers(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        fields = {"allowed_token_ids": [65, EOS], "bad_words": ["A"]}
        for path, body in ((CHAT, chat()), (COMPLETE, {"prompt": "x"})):
            response = await client.post(path, json={**body, **fields})
            assert response.status_code == 200, response.text
        await client.post(CHAT, json=chat(bad_words=[]))
    sent = [job.spec.sampling.grammar for job in router.prefill.submitted]
    expected = TokenRules((TokenId(65), EOS), (ids("A"),)).grammar
    assert sent == [expected, expected, None]
