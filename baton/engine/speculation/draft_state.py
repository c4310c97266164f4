"""What is kept of one sequence, so that text without repetitions is hardly looked at."""

MAX_FRUITLESS = 24
"""Number of fruitless looks in a row after which decisions are skipped. A gap between two
repetitions, such as two lines that an edit adds, is mostly shorter."""

MAX_RATE = 0.98
"""Rates count as this at most, so that the chances of a draft's tokens decrease."""

MAX_PERIOD = 8
"""Maximum number of decisions from one look to the next. With one token a step, a text that begins
to repeat is noticed so many tokens late."""


class DraftState:
    """Says at which decisions about drafts a sequence is looked at: at those whose number is
    divisible by ``period``, so that sequences that are seldom looked at are so in the same steps.

    A look is fruitless if it finds nothing promising, or if no token of the draft is right. After
    ``MAX_FRUITLESS`` fruitless looks in a row the period is two decisions, and doubles after each
    further one, up to ``MAX_PERIOD``, until a look finds a draft that pays. Sources derive their
    states from this."""

    __slots__ = ("_num_fruitless", "period")

    def __init__(self) -> None:
        self.period = 1
        self._num_fruitless = 0

    def count_fruitless(self) -> None:
        self._num_fruitless += 1
        if self._num_fruitless >= MAX_FRUITLESS:
            self.period = min(2 * self.period, MAX_PERIOD)

    def look_again(self) -> None:
        """Look at the sequence at the next decision: it is to get a draft, now or when its next
        token is known."""
        self.period = 1

    def reset(self) -> None:
        """Begin to count again: a draft was right."""
        self._num_fruitless, self.period = 0, 1
