"""How long an answer will be, as far as its tenant's answers before tell."""

import math
from collections import OrderedDict
from dataclasses import dataclass

MIN_ANSWERS = 4
"""Of a tenant (else of all tenants together), before they are believed."""

WEIGHT = 0.05
"""Of the newest answer: the last few dozen count."""

DEVIATIONS = 0.85
"""Above the mean of the logarithm: four of five log-normal answers are shorter. Who underestimates
preempts, who overestimates leaves room unused."""

OUTGROWN_FACTOR = 1.5
"""An answer that outgrows its prediction is taken to become half as long again, and so on."""

MAX_TENANTS = 1024


@dataclass(slots=True)
class _LogNormalLength:
    """Mean and variance of the logarithm: plain for the first ones, then fading."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def learn(self, value: float) -> None:
        self.count += 1
        weight = max(WEIGHT, 1 / self.count)
        distance = value - self.mean
        self.mean += weight * distance
        self.variance = (1 - weight) * (self.variance + weight * distance * distance)

    @property
    def expected(self) -> float:
        return math.exp(self.mean + DEVIATIONS * math.sqrt(self.variance))


class AnswerLengthPredictor:
    """Of one model. ``unknown_tokens`` is what an answer is taken for while nothing is known;
    None: the most that it may become."""

    def __init__(self, unknown_tokens: int | None = None) -> None:
        self._unknown_tokens = unknown_tokens
        self._all = _LogNormalLength()
        self._tenants: OrderedDict[bytes, _LogNormalLength] = OrderedDict()

    def learn(self, tenant: bytes, num_tokens: int, *, cut: bool) -> None:
        """An answer has ended. One that was ``cut`` at its limit would have become longer: it
        counts only if it is longer than what was expected."""
        num_tokens = max(num_tokens, 1)
        lengths = self._tenants.get(tenant)
        if lengths is None:
            lengths = self._tenants[tenant] = _LogNormalLength()
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        for each in (lengths, self._all):
            if not cut or each.count < MIN_ANSWERS or num_tokens > each.expected:
                each.learn(math.log(num_tokens))

    def expect(self, tenant: bytes, max_tokens: int) -> int:
        """Tokens of an answer of at most ``max_tokens``, 1 at least."""
        lengths = self._tenants.get(tenant)
        if lengths is None or lengths.count < MIN_ANSWERS:
            lengths = self._all
        if lengths.count >= MIN_ANSWERS:
            return max(1, min(max_tokens, round(lengths.expected)))
        unknown = max_tokens if self._unknown_tokens is None else self._unknown_tokens
        return max(1, min(max_tokens, unknown))


def revised_prediction(expected: int, num_tokens: int, max_tokens: int) -> int:
    """What to expect of an answer that has ``num_tokens`` already and isn't over."""
    if expected <= num_tokens:
        expected = math.ceil(max(num_tokens, 1) * OUTGROWN_FACTOR)
    return min(expected, max_tokens)
