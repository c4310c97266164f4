"""The mock model: every worker generates the same token for the same prompt, seed and position."""

from array import array
from collections.abc import Sequence
from itertools import islice

import xxhash

from baton.core.ids import TokenId
from baton.core.request import RequestSpec, SamplingParams, TokenLogprob
from baton.errors import Invalid
from baton.text.tokenizer import Tokenizer
from baton.worker.limits import MAX_DISTINCT_TOKENS

STRIDE = 7919
"""Distance between successive tokens of an answer. It is a prime, so that an answer contains all
tokens before it repeats one. A lost, repeated or misplaced token is therefore detected."""


class MockModel:
    """Generates deterministic answers. ``token_ids`` are the tokens that may occur."""

    def __init__(self, token_ids: Sequence[TokenId]) -> None:
        if not token_ids:
            raise Invalid(
                "the tokenizer has no plain-text token: mock workers generate only tokens of "
                "printable ASCII characters"
            )
        self._token_ids = tuple(token_ids)

    def answer_key(self, spec: RequestSpec) -> int:
        """Return a key that identifies the request's answer. Tokens emitted before a failover do
        not change it."""
        prompt = array("I", spec.token_ids[: spec.num_prompt_tokens])
        seed = 0 if spec.sampling.is_greedy else spec.sampling.seed
        return xxhash.xxh3_64_intdigest(prompt.tobytes(), seed)

    def token_at(self, key: int, index: int) -> TokenId:
        """Return the token at position ``index`` of the answer, from 0."""
        ids = self._token_ids
        return ids[(key + index * STRIDE) % len(ids)]

    def expected_answer(self, spec: RequestSpec) -> list[TokenId]:
        """Return the whole answer, assuming that no stop token ends it early. Tests compare answers
        with it."""
        key = self.answer_key(spec)
        return [self.token_at(key, index) for index in range(spec.sampling.max_tokens)]

    def logprobs(self, sampling: SamplingParams, token_id: TokenId) -> tuple[TokenLogprob, ...]:
        """Return made-up logprobs, in which the generated token is the most likely one."""
        if sampling.logprobs is None:
            return ()
        others = (other for other in self._token_ids if other != token_id)
        top = [token_id, *islice(others, max(sampling.logprobs - 1, 0))][: sampling.logprobs]
        ranked = tuple((other, -1.0 - rank) for rank, other in enumerate(top))
        return (TokenLogprob(token_id, -1.0, ranked),)


def build_mock_model(tokenizer: Tokenizer, vocab_size: int) -> MockModel:
    """Build a model whose tokens are all printable ASCII, so that every token yields text."""
    size = min(tokenizer.vocab_size, vocab_size)
    plain = (TokenId(i) for i in range(size) if _is_plain(tokenizer, i))
    return MockModel(tuple(islice(plain, MAX_DISTINCT_TOKENS)))


def _is_plain(tokenizer: Tokenizer, token_id: int) -> bool:
    if tokenizer.is_hidden(token_id):
        return False
    text = tokenizer.token_bytes(token_id)
    return bool(text) and text.isascii() and text.decode("ascii").isprintable()
