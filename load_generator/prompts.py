"""Generates prompts of a given length that share prefixes wherever the trace's requests share
blocks.

Each block is a unique marker followed by words cut from one text. Therefore, equal blocks have
equal text, different blocks differ in their first word, and making a prompt of any length takes
only a few slices.
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
"""Short and frequent words, so that most vocabularies have one token for each."""

NUM_TEXT_WORDS = 1 << 14
"""The length in words of the text that blocks are cut from; longer blocks take several pieces."""

FIRST_ID, NUM_IDS = 300, 1024
"""The range of token ids used: every vocabulary has these ids, and none uses them for special
tokens."""

_IDS = [FIRST_ID + number * 389 % NUM_IDS for number in range(NUM_TEXT_WORDS)]


@dataclass(frozen=True, slots=True)
class TokenCalibration:
    """How the server counts tokens: the number of tokens per word, and the number of tokens that it
    adds to each prompt (for example with its chat template)."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0


class PromptText:
    """Generates prompts of text. ``salt`` is part of the first block, so that different runs have
    different prompts."""

    def __init__(self, salt: str, calibration: TokenCalibration) -> None:
        self._salt = salt
        self._calibration = calibration
        words = list(islice(cycle(WORDS.split()), 2 * NUM_TEXT_WORDS))
        self._text = " ".join(words)
        self._word_offsets = [0]
        for word in words:
            self._word_offsets.append(self._word_offsets[-1] + len(word) + 1)

    def make_prompt(self, arrival: TraceRequest, block_tokens: int, repetition: int = 0) -> str:
        """Return the prompt of a request. ``repetition`` is the number of times that the trace has
        been sent before; each repetition has different prompts."""
        around, per_word = self._calibration.overhead_tokens, self._calibration.tokens_per_word
        words = max(round((arrival.num_prompt_tokens - around) / per_word), 1)
        per_block = max(round(block_tokens / per_word), 1)
        parts, salt = [], f"{self._salt}{repetition}."
        for block in arrival.block_ids:
            if words <= 0:
                break
            parts.append(self._block(f"{salt}{block}", block, min(per_block, words)))
            salt, words = "", words - per_block
        return " ".join(parts)

    def _block(self, marker: str, block: int, num_words: int) -> str:
        """Return a block of ``num_words`` words; the first one is the marker."""
        parts, num_missing, first = [marker], num_words - 1, block * 37 % NUM_TEXT_WORDS
        while num_missing > 0:
            count = min(num_missing, NUM_TEXT_WORDS)
            parts.append(
                self._text[self._word_offsets[first] : self._word_offsets[first + count] - 1]
            )
            num_missing -= count
        return " ".join(parts)


def token_ids(
    arrival: TraceRequest, block_tokens: int, salt: int, repetition: int = 0
) -> list[int]:
    """Return the prompt of a request as token ids. It has exactly the request's prompt length."""
    ids: list[int] = []
    for block in arrival.block_ids:
        name, marker = (salt + repetition) * 1_000_003 + block, []
        for _ in range(4):
            name, digit = divmod(name, NUM_IDS)
            marker.append(FIRST_ID + digit)
        first = block * 37 % (NUM_TEXT_WORDS // 2)
        rest = _IDS[first : first + max(block_tokens - len(marker), 0)]
        ids += (marker + rest)[:block_tokens]
    missing = arrival.num_prompt_tokens - len(ids)
    ids += islice(cycle(_IDS), max(missing, 0))
    return ids[: arrival.num_prompt_tokens]


@dataclass(frozen=True, slots=True)
class RequestBodyEncoder:
    """Encodes request bodies. If ``as_tokens`` is true, prompts are token ids, else text. If
    ``chat`` is true, the text is a user message. ``extra`` holds additional fields for every
    body."""

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

    def encode_body(self, arrival: TraceRequest, repetition: int = 0) -> bytes:
        prompt: str | Sequence[int]
        if self.as_tokens:
            prompt = token_ids(arrival, self.block_tokens, self.salt, repetition)
        else:
            prompt = self.text.make_prompt(arrival, self.block_tokens, repetition)
        input_field = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {
            "prompt": prompt
        }  # fmt: skip
        return orjson.dumps(
            {
                "model": self.model,
                **input_field,
                "max_tokens": max(arrival.num_answer_tokens, 1),
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.extra,
            }
        )
