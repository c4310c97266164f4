"""Fits the cost of a step to measured steps."""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from simulator.step_cost import StepCost, StepWork

Array = npt.NDArray[np.float64]

MAX_CROSSOVERS = 64
"""The maximum number of sizes of steps that are tried as the one from which on products take longer
than reading the weights. Each takes a few milliseconds."""


def fit_step_cost(works: Sequence[StepWork], seconds: Sequence[float]) -> StepCost:
    """Return the costs for which the sum of the squares of the relative errors is lowest; no cost
    is negative.

    :class:`StepCost` is linear in its parameters once it is known for each step whether reading the
    weights or computing takes longer. So each possible crossover, between two sizes of measured
    steps, is tried: in smaller steps products take a fixed time, and in larger ones a time per
    token. A solution is judged by what it predicts, with the longer of both."""
    sizes = sorted({work.num_tokens for work in works})
    stride = -(-len(sizes) // MAX_CROSSOVERS)
    found = (_fit(works, seconds, least) for least in [0, *sizes[::stride], math.inf])
    return min(found, key=lambda cost: _squared_error(cost, works, seconds))


def relative_errors(
    cost: StepCost, works: Sequence[StepWork], seconds: Sequence[float]
) -> list[float]:
    """Return how much longer each step is predicted to take than it took, as a share of it."""
    return [cost.seconds(work) / took - 1 for work, took in zip(works, seconds, strict=True)]


def least_squares(relative: Array) -> Array:
    """Return the non-negative vector x for which ``relative @ x`` is closest to a vector of ones,
    which would mean no relative error. ``relative`` (``[num_rows, num_costs]``) has each row's
    terms, divided by its measured seconds. For each subset of the columns, the unconstrained
    problem is solved; the best of these solutions without a negative value is x."""
    num_costs = relative.shape[1]
    subsets = (
        list(subset)
        for size in range(num_costs, 0, -1)
        for subset in combinations(range(num_costs), size)
    )
    best, best_error = np.zeros(num_costs), math.inf
    for columns in subsets:
        solution = np.linalg.lstsq(relative[:, columns], np.ones(len(relative)), rcond=None)[0]
        error = float(np.sum((relative[:, columns] @ solution - 1) ** 2))
        if (solution >= 0).all() and error < best_error:
            best, best_error = np.zeros(num_costs), error
            best[columns] = solution
    return best


def _fit(works: Sequence[StepWork], seconds: Sequence[float], least_tokens: float) -> StepCost:
    """Fit the costs under the assumption that steps of ``least_tokens`` tokens and more take longer
    to compute than to read the weights."""
    terms = [
        (
            1.0,
            work.num_tokens < least_tokens,
            work.num_tokens if work.num_tokens >= least_tokens else 0,
            work.num_pairs,
            work.context_tokens,
            work.num_requests,
        )
        for work in works
    ]
    columns = np.array(terms, dtype=np.float64)
    scale = np.maximum(columns.max(axis=0), 1e-300)
    costs = least_squares(columns / scale / np.array(seconds)[:, None]) / scale
    overhead, weights, per_token, per_pair, per_context, per_request = costs.tolist()
    return StepCost(overhead, weights, per_token, per_pair, per_context, per_request)


def _squared_error(cost: StepCost, works: Sequence[StepWork], seconds: Sequence[float]) -> float:
    return sum(error * error for error in relative_errors(cost, works, seconds))
