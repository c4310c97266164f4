"""Draft sources for tests: they draft often, and know which of their drafts are right."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from hashlib import blake2b

from baton.core.ids import TokenId
from baton.core.request import RequestSpec
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.engine.speculation.draft_source import DraftRequest
from baton.engine.speculation.draft_state import DraftState

KnownAnswer = Callable[[RequestSpec], Seq[TokenId]]
"""Returns the tokens that follow ``spec.token_ids``."""


class OracleSource:
    """Drafts from answers that the test knows, with a wrong token in most drafts: after how many
    right ones depends on ``seed`` and on the position."""

    def __init__(self, known_answer: KnownAnswer, vocab_size: int, seed: int) -> None:
        self._known_answer = known_answer
        self._vocab_size = vocab_size
        self._seed = seed
        self._answers: dict[tuple[object, ...], Seq[TokenId]] = {}

    def observe(self, sequence: Sequence) -> bool:
        if sequence.draft_state is None:
            sequence.draft_state = DraftState()
        return True

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted

    def chances(self, sequence: Sequence, num_tokens: int, num_coming: int) -> Seq[float]:
        return [0.99**depth for depth in range(1, num_tokens + 1)]

    def draft(self, requests: Seq[DraftRequest]) -> list[tuple[TokenId, ...]]:
        return [self._draft(each.sequence, each.num_tokens) for each in requests]

    def _draft(self, sequence: Sequence, num_tokens: int) -> tuple[TokenId, ...]:
        spec = sequence.spec
        key = (spec.request_id, spec.token_ids)
        if key not in self._answers:
            self._answers[key] = self._known_answer(spec)
        known = sequence.num_known_tokens - len(spec.token_ids)
        tokens = list(self._answers[key][known : known + num_tokens])
        tokens += [TokenId(0)] * (num_tokens - len(tokens))
        text = f"{self._seed} {spec.request_id} {known}".encode()
        wrong = blake2b(text, digest_size=1).digest()[0] % (num_tokens + 2)
        if wrong < num_tokens:
            tokens[wrong] = TokenId((tokens[wrong] + 1) % self._vocab_size)
        return tuple(tokens)


class _FreeDrafts:
    """Costs by which drafts cost nothing, so that as many as possible are verified."""

    def record(self, num_tokens: int, seconds: float) -> None:
        pass

    def has_base(self, num_answers: int) -> bool:
        return True

    def predict(self, num_answers: int, max_drafts: int) -> list[float]:
        return [1.0] * (max_drafts + 1)


def draft_always(engine: Engine) -> None:
    """Let the engine verify as many drafts as there are, whatever steps cost."""
    assert engine._speculator is not None
    engine._speculator._costs = _FreeDrafts()  # type: ignore[assignment]
