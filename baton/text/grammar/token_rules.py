"""Rules about the tokens of an answer: which tokens are allowed, and which sequences must not
occur.

They are sent as a grammar (GrammarKind.TOKEN_RULES), since they constrain an answer in the same
way: what is allowed next depends only on the rules and on the answer's tokens so far.
"""

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import TokenId
from baton.errors import Invalid
from baton.text.grammar.limits import MAX_ALLOWED_TOKENS, MAX_BANNED_TOKENS


@dataclass(frozen=True, slots=True)
class TokenRules:
    """``allowed`` are the only tokens that an answer may have; None allows all. ``banned`` are
    sequences of tokens that must not occur in the answer: where all tokens of a sequence but the
    last have just occurred, its last token is not allowed."""

    allowed: tuple[TokenId, ...] | None = None
    banned: tuple[tuple[TokenId, ...], ...] = ()

    @property
    def grammar(self) -> Grammar:
        value = {"allowed": self.allowed, "banned": self.banned}
        return Grammar(GrammarKind.TOKEN_RULES, json.dumps(value, separators=(",", ":")))

    @classmethod
    def parse(cls, text: str) -> "TokenRules":
        """Parse the text of a grammar of kind TOKEN_RULES. Raises Invalid for a malformed text."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Invalid("token rules must be JSON", param="grammar") from error
        if not isinstance(value, dict) or value.keys() != {"allowed", "banned"}:
            raise Invalid(
                "token rules must be an object with the fields `allowed` and `banned`",
                param="grammar",
            )
        allowed, banned = value["allowed"], value["banned"]
        is_valid = (allowed is None or _are_tokens(allowed, MAX_ALLOWED_TOKENS)) and (
            isinstance(banned, list)
            and all(_are_tokens(each, MAX_BANNED_TOKENS) for each in banned)
            and sum(map(len, banned)) <= MAX_BANNED_TOKENS
        )
        if not is_valid:
            raise Invalid(
                f"in token rules, `allowed` must be null or a list of 1 to {MAX_ALLOWED_TOKENS} "
                "token ids, and `banned` a list of lists of token ids, with at most "
                f"{MAX_BANNED_TOKENS} ids in total",
                param="grammar",
            )
        return cls(None if allowed is None else tuple(allowed), tuple(map(tuple, banned)))


class TokenRuleMatcher:
    """The state of one answer with respect to its token rules. Implements
    ``baton.engine.constraint.Constraint``. The constructor raises Invalid for rules with a token
    outside of the vocabulary."""

    def __init__(
        self, rules: TokenRules, vocab_size: int, token_ids: Sequence[TokenId] = ()
    ) -> None:
        named = [*(rules.allowed or ()), *(each for banned in rules.banned for each in banned)]
        if named and max(named) >= vocab_size:
            raise Invalid(
                f"token ids must be below {vocab_size}, the size of the vocabulary", param="grammar"
            )
        self.error = ""
        self._always = _base_mask(rules, vocab_size)
        self._by_previous: dict[TokenId, list[tuple[TokenId, ...]]] = defaultdict(list)
        for banned in rules.banned:
            if len(banned) > 1:
                self._by_previous[banned[-2]].append(banned)
        longest = max(map(len, rules.banned), default=1)
        self._recent = deque(token_ids, maxlen=max(longest - 1, 1))

    def accept(self, token_id: TokenId) -> None:
        self._recent.append(token_id)

    def mask(self) -> bytes:
        mask = self._current_mask()
        if mask.count(0) == len(mask):
            self.error = "allowed_token_ids and bad_words allow no further token"
            return b""
        return mask

    def _current_mask(self) -> bytes:
        recent = tuple(self._recent)
        candidates = self._by_previous.get(recent[-1], ()) if recent else ()
        banned = [each[-1] for each in candidates if recent[-len(each) + 1 :] == each[:-1]]
        return _without(self._always, banned) if banned else self._always


def _base_mask(rules: TokenRules, vocab_size: int) -> bytes:
    """Return the mask of the tokens that are allowed as long as no banned sequence of several
    tokens is about to be completed."""
    if rules.allowed is None:
        mask = bytearray(((1 << vocab_size) - 1).to_bytes(-(-vocab_size // 8), "little"))
    else:
        mask = bytearray(-(-vocab_size // 8))
        for token_id in rules.allowed:
            mask[token_id // 8] |= 1 << token_id % 8
    return _without(mask, [each[0] for each in rules.banned if len(each) == 1])


def _without(mask: bytes | bytearray, token_ids: Sequence[TokenId]) -> bytes:
    changed = bytearray(mask)
    for token_id in token_ids:
        changed[token_id // 8] &= ~(1 << token_id % 8) & 0xFF
    return bytes(changed)


def _are_tokens(value: Any, max_tokens: int) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= max_tokens
        and all(type(each) is int and each >= 0 for each in value)
    )
