"""Costs of a worker that are fitted to a table of measurements."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.core.cost import DecodeCost, PrefillCost
from baton.errors import Invalid
from baton.traces.json_fields import JsonFields, parse_fields
from simulator.step_cost import StepCost, StepWork, WorkerCosts

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


MAX_COUNT = 1 << 50
"""Maximum of any count in a table."""


_Terms = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A row of a table: a step of a prompt (``new_tokens`` after ``cached_tokens``), of ``batch``
    answers with ``context_tokens`` tokens of context in total, or of both."""

    new_tokens: int
    cached_tokens: int
    batch: int
    context_tokens: int
    seconds: float

    @property
    def work(self) -> StepWork:
        return StepWork(
            self.new_tokens + self.batch,
            self.batch + (self.new_tokens > 0),
            self.num_pairs,
            self.context_tokens,
        )

    @property
    def num_pairs(self) -> float:
        """The number of pairs of a query token and a key token of the prompt."""
        return self.new_tokens * (self.cached_tokens + self.new_tokens / 2)


@dataclass(frozen=True, slots=True)
class CostTable:
    """A table of measured steps."""

    where: str
    prefill: tuple[MeasuredStep, ...]
    decode: tuple[MeasuredStep, ...]
    mixed: tuple[MeasuredStep, ...]
    kv_bytes_per_token: int
    kv_capacity_tokens: int

    @classmethod
    def parse(cls, text: str, where: str) -> "CostTable":
        """Parse a table; ``where`` names it in errors. Raises Invalid for a malformed table."""
        table = parse_fields(text, where)
        return cls(
            where,
            kv_bytes_per_token=table.integer("kv_bytes_per_token", 1, MAX_COUNT),
            kv_capacity_tokens=table.integer("kv_capacity_tokens", 1, MAX_COUNT),
            prefill=tuple(map(_prefill_row, table.objects("prefill"))),
            decode=tuple(map(_decode_row, table.objects("decode"))),
            mixed=tuple(map(_mixed_row, table.objects("mixed"))) if table.has("mixed") else (),
        )

    @property
    def steps(self) -> tuple[MeasuredStep, ...]:
        return (*self.prefill, *self.decode, *self.mixed)

    def costs(self) -> WorkerCosts:
        """Return the costs, fitted to the measurements. If there are mixed steps, the cost of steps
        is fitted to all rows; otherwise it follows from the other costs. Raises Invalid if the
        measurements don't determine the costs."""
        prefill = PrefillCost(*self._fit("prefill", "new_tokens and cached_tokens", _prefill_terms))
        decode = DecodeCost(*self._fit("decode", "batch and context_tokens", _decode_terms))
        step = StepCost.from_measured(prefill, decode)
        if self.mixed:
            rows = self.steps
            step = fit_step_cost([row.work for row in rows], [row.seconds for row in rows])
        return WorkerCosts(prefill, decode, self.kv_bytes_per_token, self.kv_capacity_tokens, step)

    def _fit(self, name: str, fields: str, terms: Callable[[MeasuredStep], _Terms]) -> _Terms:
        """Fit a cost model's three parameters to the measurements ``name``. Raises Invalid if they
        do not determine the parameters; the message asks for small and large values of
        ``fields``."""
        rows: tuple[MeasuredStep, ...] = getattr(self, name)
        seconds = np.array([row.seconds for row in rows])
        columns = np.array([terms(row) for row in rows]).reshape(-1, 3)
        scale = columns.max(axis=0, initial=1.0)
        if np.linalg.matrix_rank(columns / scale) < 3:
            raise Invalid(
                f"{self.where}: the {len(rows)} rows of {name} do not determine its three costs; "
                f"there must be at least three rows, with small and large values of {fields}"
            )
        costs = least_squares(columns / scale / seconds[:, None]) / scale
        return float(costs[0]), float(costs[1]), float(costs[2])


def costs_from_table(path: Path) -> WorkerCosts:
    """Fit the costs to measurements. The file is a JSON object with ``prefill``, a list of
    ``{"new_tokens", "cached_tokens", "seconds"}``; ``decode``, a list of ``{"batch",
    "context_tokens", "seconds"}``, where ``context_tokens`` is the total over all requests;
    optionally ``mixed``, a list of steps with the fields of both; ``kv_bytes_per_token``; and
    ``kv_capacity_tokens``.

    Costs are not negative, and relative errors are minimized, so that short runs matter as much as
    long ones. Raises Invalid for a table that is not of this form, or that does not determine the
    costs."""
    return CostTable.parse(_read_text(path), str(path)).costs()


def _prefill_row(row: JsonFields) -> MeasuredStep:
    new, cached = _prompt(row)
    return MeasuredStep(new, cached, 0, 0, row.positive("seconds"))


def _decode_row(row: JsonFields) -> MeasuredStep:
    batch, context = _answers(row)
    return MeasuredStep(0, 0, batch, context, row.positive("seconds"))


def _mixed_row(row: JsonFields) -> MeasuredStep:
    return MeasuredStep(*_prompt(row), *_answers(row), row.positive("seconds"))


def _prompt(row: JsonFields) -> tuple[int, int]:
    return row.integer("new_tokens", 1, MAX_COUNT), row.integer("cached_tokens", 0, MAX_COUNT)


def _answers(row: JsonFields) -> tuple[int, int]:
    return row.integer("batch", 1, MAX_COUNT), row.integer("context_tokens", 0, MAX_COUNT)


def _prefill_terms(row: MeasuredStep) -> _Terms:
    """Return the factors by which PrefillCost's three parameters are multiplied in the time of a
    measured prefill: 1, the number of computed tokens, and the number of pairs of a query token and
    a key token."""
    return 1.0, row.new_tokens, row.num_pairs


def _decode_terms(row: MeasuredStep) -> _Terms:
    """Return the factors by which DecodeCost's first three parameters are multiplied in the time of
    a measured decode step: 1, the number of requests, and the total number of their context
    tokens."""
    return 1.0, row.batch, row.context_tokens


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise Invalid(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Invalid(f"{path} is not UTF-8 text ({error.reason}); it must be JSON") from error
