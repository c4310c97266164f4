"""Turns the fields ``allowed_token_ids`` and ``bad_words`` into rules about an answer's tokens."""

from collections.abc import Iterable
from typing import cast

from baton.core.grammar import Grammar
from baton.core.ids import TokenId
from baton.text.grammar.limits import MAX_BANNED_TOKENS
from baton.text.grammar.token_rules import TokenRules
from baton.text.tokenizer import Tokenizer
from router.errors import invalid_field
from router.serving.request import GenerationRequest


def token_rules_grammar(request: GenerationRequest, tokenizer: Tokenizer) -> Grammar | None:
    """Return the rules as a grammar; None if the request has none. The token ids must have been
    checked. Raises ApiError (400) for too many bad words."""
    if not request.allowed_token_ids and not request.bad_words:
        return None
    allowed = cast(list[TokenId] | None, request.allowed_token_ids)
    banned = tuple(_banned_sequences(request.bad_words or (), tokenizer))
    if sum(map(len, banned)) > MAX_BANNED_TOKENS:
        message = f"bad_words have more than {MAX_BANNED_TOKENS} tokens in total"
        raise invalid_field("bad_words", message)
    return TokenRules(None if allowed is None else tuple(allowed), banned).grammar


def _banned_sequences(words: Iterable[str], tokenizer: Tokenizer) -> Iterable[tuple[TokenId, ...]]:
    """For each word, yield its tokens at the beginning of a text. Also yield its tokens after a
    space if they begin with another token and are equal in number. As in vLLM, an answer can still
    contain the word if the model spells it with other tokens."""
    for word in words:
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if bare:
            yield cast(tuple[TokenId, ...], tuple(bare))
        if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
            yield cast(tuple[TokenId, ...], tuple(spaced))
