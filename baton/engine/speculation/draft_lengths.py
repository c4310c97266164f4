"""Decides how many tokens to draft for each answer of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIN_GAIN = 1.05
"""Nothing is drafted unless it is predicted to raise the tokens per second at least by this
factor, since predictions are not exact."""

PredictSeconds = Callable[[int, int], Sequence[float]]
"""Returns the seconds of steps of so many answers with 0, 1, … max_drafts drafts."""


@dataclass(frozen=True, slots=True)
class DraftDecision:
    """``lengths`` has the number of tokens to draft for each answer; it is empty if nothing is
    drafted. ``gain`` is the predicted ratio of the tokens per second with and without these
    drafts."""

    lengths: tuple[int, ...]
    gain: float = 1.0

    @property
    def num_drafts(self) -> int:
        return sum(self.lengths)


NO_DRAFTS = DraftDecision(())


def choose_draft_lengths(
    chances: Sequence[Sequence[float]],
    predict_seconds: PredictSeconds,
    *,
    max_drafts: int,
    min_gain: float = MIN_GAIN,
) -> DraftDecision:
    """Choose the draft lengths with the most tokens per second. Draft nothing if the gain would be
    below ``min_gain``.

    ``chances[i][j]`` is the probability that the first j + 1 drafts of answer i are right,
    decreasing in j. A step yields one token per answer and the drafts that are right, so drafts are
    considered in the order of their chances: of the first n, for each n up to ``max_drafts``, the
    expected number of tokens is divided by the seconds of a step with that many tokens."""
    num_answers = len(chances)
    most = num_answers + sum(map(sum, chances))
    if most < min_gain * num_answers:  # even if drafts cost nothing
        return NO_DRAFTS
    drafts = [
        (-chance, depth, answer)
        for answer, each in enumerate(chances)
        for depth, chance in enumerate(each, 1)
    ]
    if not drafts or max_drafts < 1:
        return NO_DRAFTS
    drafts.sort()
    del drafts[max_drafts:]
    seconds = predict_seconds(num_answers, len(drafts))
    plain = best = num_answers / seconds[0]
    num_best, expected = 0, float(num_answers)
    for count, (chance, _, _) in enumerate(drafts, 1):
        expected -= chance
        rate = expected / seconds[count]
        if rate > best:
            best, num_best = rate, count
    if best < min_gain * plain:
        return NO_DRAFTS
    lengths = [0] * num_answers
    for _, depth, answer in drafts[:num_best]:
        lengths[answer] = max(lengths[answer], depth)
    return DraftDecision(tuple(lengths), best / plain)
