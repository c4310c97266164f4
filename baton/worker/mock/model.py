"""What mock workers say: the same for the same prompt, seed and position, on every one of them."""

from array import array
from collections.abc import Sequence
from itertools import islice

import xxhash

from baton.core.ids import TokenId
from baton.core.request import RequestSpec, SamplingParams, TokenLogprob
from baton.errors import Invalid
from baton.text.tokenizer import Tokenizer

MAX_DISTINCT_TOKENS = 4096
"""Different ones that are said. Each is remembered in its encoded form, too."""

STRIDE = 7919
"""Prime, so that an answer goes through all tokens before it repeats one, and a token that is
lost, repeated or out of its place is seen."""


class MockModel:
    """``token_ids`` are those that may be said."""

    def __init__(self, token_ids: Sequence[TokenId]) -> None:
        if not token_ids:
            raise Invalid("the tokenizer has no token of plain text for a mock worker to say")
        self._token_ids = tuple(token_ids)

    def key(self, spec: RequestSpec) -> int:
        """Of an answer; what was emitted of it before a failover does not count."""
        prompt = array("I", spec.token_ids[: spec.num_prompt_tokens])
        seed = 0 if spec.sampling.greedy else spec.sampling.seed
        return xxhash.xxh3_64_intdigest(prompt.tobytes(), seed)

    def token(self, key: int, index: int) -> TokenId:
        """At position ``index`` of the answer, from 0."""
        ids = self._token_ids
        return ids[(key + index * STRIDE) % len(ids)]

    def answer(self, spec: RequestSpec) -> list[TokenId]:
        """All of it, if no token stops it: what an answer is checked against."""
        key = self.key(spec)
        return [self.token(key, index) for index in range(spec.sampling.max_tokens)]

    def logprobs(self, sampling: SamplingParams, token_id: TokenId) -> tuple[TokenLogprob, ...]:
        """The token is the likeliest, those around it in the vocabulary follow."""
        if sampling.logprobs is None:
            return ()
        others = (other for other in self._token_ids if other != token_id)
        top = [token_id, *islice(others, max(sampling.logprobs - 1, 0))][: sampling.logprobs]
        ranked = tuple((other, -1.0 - rank) for rank, other in enumerate(top))
        return (TokenLogprob(token_id, -1.0, ranked),)


def build_mock_model(tokenizer: Tokenizer, vocab_size: int) -> MockModel:
    """Tokens that are some printable ASCII each, so that every one of them shows at once."""
    size = min(tokenizer.vocab_size, vocab_size)
    plain = (TokenId(i) for i in range(size) if _is_plain(tokenizer, i))
    return MockModel(tuple(islice(plain, MAX_DISTINCT_TOKENS)))


def _is_plain(tokenizer: Tokenizer, token_id: int) -> bool:
    if tokenizer.is_hidden(token_id):
        return False
    text = tokenizer.token_bytes(token_id)
    return bool(text) and text.isascii() and text.decode("ascii").isprintable()
