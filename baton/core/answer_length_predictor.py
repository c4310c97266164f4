"""Predicts the length of an answer from earlier answers of the same tenant or, while that tenant
has too few answers, from those of all tenants."""

import math
from collections import OrderedDict
from dataclasses import dataclass

MIN_ANSWERS = 4
"""Minimum number of answers for a prediction. A tenant's own answers are used once there are this
many; until then, those of all tenants, once there are this many."""

WEIGHT = 0.05
"""Weight of the newest answer in the moving averages, so that the last few dozen answers count."""

NUM_STANDARD_DEVIATIONS = 0.85
"""The prediction is this many standard deviations above the mean of the logarithm: four of five
log-normal answers are shorter. Underestimates cause preemptions, overestimates leave memory
unused."""

OUTGROWN_FACTOR = 1.5
"""When an answer outgrows its prediction, the new prediction is its length times this."""

MAX_TENANTS = 1024


@dataclass(slots=True)
class _LogNormalLength:
    """Mean and variance of the logarithm of lengths. They are plain averages at first, and later
    exponentially weighted averages."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def update(self, value: float) -> None:
        self.count += 1
        weight = max(WEIGHT, 1 / self.count)
        distance = value - self.mean
        self.mean += weight * distance
        self.variance = (1 - weight) * (self.variance + weight * distance * distance)

    @property
    def expected(self) -> float:
        return math.exp(self.mean + NUM_STANDARD_DEVIATIONS * math.sqrt(self.variance))


class AnswerLengthPredictor:
    """Predicts answer lengths for one model. ``default_tokens`` is the prediction while there are
    too few answers; if it is None, the prediction is then the maximum that the request allows."""

    def __init__(self, default_tokens: int | None = None) -> None:
        self._unknown_tokens = default_tokens
        self._all = _LogNormalLength()
        self._tenants: OrderedDict[bytes, _LogNormalLength] = OrderedDict()

    def record_length(self, tenant: bytes, num_tokens: int, *, was_truncated: bool) -> None:
        """Record the length of a finished answer. An answer that was truncated at its limit would
        have been longer, so it is ignored unless it is longer than the current prediction, or there
        are still too few answers to predict from."""
        num_tokens = max(num_tokens, 1)
        lengths = self._tenants.get(tenant)
        if lengths is None:
            lengths = self._tenants[tenant] = _LogNormalLength()
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        for each in (lengths, self._all):
            if not was_truncated or each.count < MIN_ANSWERS or num_tokens > each.expected:
                each.update(math.log(num_tokens))

    def predict_tokens(self, tenant: bytes, max_tokens: int) -> int:
        """Predict the number of tokens of an answer, from 1 to ``max_tokens``."""
        lengths = self._tenants.get(tenant)
        if lengths is None or lengths.count < MIN_ANSWERS:
            lengths = self._all
        if lengths.count >= MIN_ANSWERS:
            return max(1, min(max_tokens, round(lengths.expected)))
        unknown = max_tokens if self._unknown_tokens is None else self._unknown_tokens
        return max(1, min(max_tokens, unknown))


def revised_prediction(predicted_tokens: int, num_tokens: int, max_tokens: int) -> int:
    """Return the predicted total length of an answer that has ``num_tokens`` so far and has not
    ended: ``predicted_tokens``, or ``OUTGROWN_FACTOR`` times ``num_tokens`` if the answer has
    already reached that prediction. The result is at most ``max_tokens``."""
    if predicted_tokens <= num_tokens:
        predicted_tokens = math.ceil(max(num_tokens, 1) * OUTGROWN_FACTOR)
    return min(predicted_tokens, max_tokens)
