"""Rules about single tokens of an answer: the only allowed ones, and sequences that must not occur.

They are carried like grammars, since they constrain an answer in the same way: what is allowed next
depends only on the rules and on the answer's tokens so far.
"""

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import TokenId
from baton.errors import Invalid

MAX_ALLOWED_TOKENS = 4096
MAX_BANNED_TOKENS = 2048
"""The maximum number of tokens in all banned sequences together. With ``MAX_ALLOWED_TOKENS``, the
text of the rules is shorter than 64 KiB, like that of a grammar."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """``allowed`` are the only tokens that an answer may have; None allows all. ``banned`` are
    sequences that must not occur in it: their last token is not allowed after the others."""

    allowed: tuple[TokenId, ...] | None = None
    banned: tuple[tuple[TokenId, ...], ...] = ()

    @property
    def grammar(self) -> Grammar:
        value = {"allowed": self.allowed, "banned": self.banned}
        return Grammar(GrammarKind.TOKEN_RULES, json.dumps(value, separators=(",", ":")))

    @classmethod
    def parse(cls, text: str) -> "TokenRules":
        """Parse the text of a grammar of kind TOKEN_RULES. Raises Invalid."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Invalid("token rules must be JSON", param="grammar") from error
        if not isinstance(value, dict) or value.keys() != {"allowed", "banned"}:
            raise Invalid("token rules must have `allowed` and `banned`", param="grammar")
        allowed, banned = value["allowed"], value["banned"]
        is_valid = (allowed is None or _are_tokens(allowed, MAX_ALLOWED_TOKENS)) and (
            isinstance(banned, list)
            and all(_are_tokens(each, MAX_BANNED_TOKENS) for each in banned)
            and sum(map(len, banned)) <= MAX_BANNED_TOKENS
        )
        if not is_valid:
            raise Invalid("token rules must be lists of token ids", param="grammar")
        return cls(None if allowed is None else tuple(allowed), tuple(map(tuple, banned)))


class TokenRuleMatcher:
    """One answer's state in its rules. Implements ``baton.engine.constraint.Constraint``. Raises
    Invalid for a token outside of the vocabulary."""

    def __init__(
        self, rules: TokenRules, vocab_size: int, token_ids: Sequence[TokenId] = ()
    ) -> None:
        named = [*(rules.allowed or ()), *(each for banned in rules.banned for each in banned)]
        if named and max(named) >= vocab_size:
            raise Invalid(f"token ids must be below {vocab_size}", param="grammar")
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
    """Return the mask of the tokens that are allowed wherever no longer sequence is banned."""
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
