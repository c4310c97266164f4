"""Prompts as long as an arrival says, that share what its blocks share.

A block is a marker of its own and plain words, cut from one text: so equal blocks are equal, others
differ in their first word, and a prompt costs some slices, however long it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import orjson

from baton.traces.trace import TraceRequest

WORDS = (
    "the of and to in is that it was for on are as with they be at one have this from or had by "
    "hot but some what there we can out other were all your when up use word how said an each she "
    "which do their time if will way about many then them would write like so these her long make "
    "thing see him two has look more day could go come did my sound no most number who over know "
    "water than call first people may down side been now find any new work part take get place "
    "made live where after back little only round man year came show every good me give our under"
)
"""Short and frequent, so that most vocabularies have a token for each."""

MOST_WORDS = 1 << 14
"""Of the text that blocks are cut from; longer blocks are cut in pieces."""

FIRST_ID, NUM_IDS = 300, 1024
"""Token ids that every vocabulary has, and that are not special in any."""

_IDS = [FIRST_ID + number * 389 % NUM_IDS for number in range(MOST_WORDS)]


@dataclass(frozen=True, slots=True)
class TokenCalibration:
    """How the server counts: tokens of a word, and of what it puts around a prompt."""

    tokens_per_word: float = 1.0
    tokens_around: float = 0.0


class PromptText:
    """``salt`` keeps prompts from being those of another run: it is in their first block."""

    def __init__(self, salt: str, measure: TokenCalibration) -> None:
        self._salt = salt
        self._measure = measure
        words = list(islice(cycle(WORDS.split()), 2 * MOST_WORDS))
        self._text = " ".join(words)
        self._starts = [0]
        for word in words:
            self._starts.append(self._starts[-1] + len(word) + 1)

    def of(self, arrival: TraceRequest, block_tokens: int, lap: int = 0) -> str:
        """``lap`` counts how often a load that goes round has begun anew."""
        around, per_word = self._measure.tokens_around, self._measure.tokens_per_word
        words = max(round((arrival.num_prompt_tokens - around) / per_word), 1)
        per_block = max(round(block_tokens / per_word), 1)
        parts, salt = [], f"{self._salt}{lap}."
        for block in arrival.blocks:
            if words <= 0:
                break
            parts.append(self._block(f"{salt}{block}", block, min(per_block, words)))
            salt, words = "", words - per_block
        return " ".join(parts)

    def _block(self, marker: str, block: int, num_words: int) -> str:
        """The marker is a word."""
        parts, left, first = [marker], num_words - 1, block * 37 % MOST_WORDS
        while left > 0:
            count = min(left, MOST_WORDS)
            parts.append(self._text[self._starts[first] : self._starts[first + count] - 1])
            left -= count
        return " ".join(parts)


def token_ids(arrival: TraceRequest, block_tokens: int, salt: int, lap: int = 0) -> list[int]:
    """The same as ids, exactly as many as the arrival says."""
    ids: list[int] = []
    for block in arrival.blocks:
        name, marker = (salt + lap) * 1_000_003 + block, []
        for _ in range(4):
            name, digit = divmod(name, NUM_IDS)
            marker.append(FIRST_ID + digit)
        first = block * 37 % (MOST_WORDS // 2)
        rest = _IDS[first : first + max(block_tokens - len(marker), 0)]
        ids += (marker + rest)[:block_tokens]
    missing = arrival.num_prompt_tokens - len(ids)
    ids += islice(cycle(_IDS), max(missing, 0))
    return ids[: arrival.num_prompt_tokens]


@dataclass(frozen=True, slots=True)
class RequestBodyEncoder:
    """Bodies of requests. With ``as_tokens`` prompts are ids, else text; with ``chat`` the text is
    a user's message. ``extra`` are fields that every body has."""

    model: str
    chat: bool
    as_tokens: bool
    block_tokens: int
    text: PromptText
    salt: int
    extra: dict[str, Any]

    @property
    def path(self) -> str:
        return "/chat/completions" if self.chat else "/completions"

    def body(self, arrival: TraceRequest, lap: int = 0) -> bytes:
        prompt: str | Sequence[int]
        if self.as_tokens:
            prompt = token_ids(arrival, self.block_tokens, self.salt, lap)
        else:
            prompt = self.text.of(arrival, self.block_tokens, lap)
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {
            "prompt": prompt
        }  # fmt: skip
        return orjson.dumps(
            {
                "model": self.model,
                **asked,
                "max_tokens": max(arrival.num_answer_tokens, 1),
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.extra,
            }
        )
