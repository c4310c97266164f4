"""Types of arrays, and operations on groups of equal values."""

from typing import cast

import numpy as np
import numpy.typing as npt

from baton.core.cost import DecodeCost

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def sums_within_groups(groups: Ints, values: Floats) -> Floats:
    """``groups`` and ``values`` have shape ``[n]``; equal groups are neighbours. Return, for each
    element, the sum of its group's values up to and including its own."""
    totals = np.cumsum(values)
    is_first = np.ones(len(groups), dtype=np.bool_)
    is_first[1:] = groups[1:] != groups[:-1]
    firsts = np.flatnonzero(is_first)
    before = (totals - values)[firsts]
    return totals - np.repeat(before, np.diff(np.append(firsts, len(groups))))


def sums_by_group(groups: Ints, values: Floats, num_groups: int) -> Floats:
    """Return, for each number below ``num_groups``, the sum of the values in that group."""
    return np.bincount(groups, weights=values, minlength=num_groups).astype(np.float64, copy=False)


def decode_step_seconds(cost: DecodeCost, batch: Floats, context_tokens: Floats) -> Floats:
    """Return the time of a decode step for each element of the arrays."""
    # The cost model is plain arithmetic, which works for arrays as well.
    return cast(Floats, cost.seconds(cast(int, batch), cast(int, context_tokens)))
