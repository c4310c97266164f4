"""Prints a measured profile of an engine, and how well its fitted costs explain it."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from baton.engine.bench.profile_step import ProfileStep
from simulator.step_cost import StepCost, StepWork, WorkerCosts


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """A step with its measured seconds, and those that two models predict: the cost of steps, and
    the cost of prefills or of decode steps (None for a mixed step)."""

    step: ProfileStep
    seconds: float
    step_seconds: float
    pool_seconds: float | None

    @property
    def step_error(self) -> float:
        return self.step_seconds / self.seconds - 1

    @property
    def pool_error(self) -> float | None:
        return None if self.pool_seconds is None else self.pool_seconds / self.seconds - 1


def predict(step: ProfileStep, seconds: float, costs: WorkerCosts) -> PredictedStep:
    pairs = step.new_tokens * (step.cached_tokens + step.new_tokens / 2)
    num_requests = step.batch + (step.new_tokens > 0)
    work = StepWork(step.new_tokens + step.batch, num_requests, pairs, step.context_tokens)
    pool = None
    if step.kind == "prefill":
        pool = costs.prefill.seconds(step.new_tokens, step.cached_tokens)
    elif step.kind == "decode":
        pool = costs.decode.seconds(step.batch, step.context_tokens)
    return PredictedStep(step, seconds, costs.step.seconds(work), pool)


def largest_errors(steps: Sequence[PredictedStep]) -> dict[str, float]:
    """Return the largest relative error of each kind of step by the cost of its pool, and of all
    steps by the cost of steps."""
    found = {
        kind: max(
            (
                abs(each.pool_error)
                for each in steps
                if each.step.kind == kind and each.pool_error is not None
            ),
            default=0.0,
        )
        for kind in ("prefill", "decode")
    }
    return found | {"steps": max((abs(each.step_error) for each in steps), default=0.0)}


def print_profile(
    console: Console,
    about: str,
    measured: Sequence[tuple[ProfileStep, float]],
    costs: WorkerCosts,
) -> None:
    """Print each step beside its predictions, the costs, and the largest errors of the steps that
    were fitted and of those that were held out."""

    def print_line(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    steps = [predict(step, seconds, costs) for step, seconds in measured]
    print_line(about)
    console.print(_table(steps))
    print_line(_describe(costs.step))
    for name, held_out in (("fitted", False), ("held out", True)):
        errors = largest_errors([each for each in steps if each.step.held_out is held_out])
        texts = ", ".join(f"{kind} {error:.1%}" for kind, error in errors.items())
        print_line(f"largest error of the steps that were {name}: {texts}")


def _table(steps: Sequence[PredictedStep]) -> Table:
    table = Table("step", box=None)
    for name in ("ms", "as a step", "error", "as prefill or decode", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in steps:
        pool, error = each.pool_seconds, each.pool_error
        table.add_row(
            f"{each.step}{' (held out)' if each.step.held_out else ''}",
            f"{each.seconds * 1e3:,.3f}",
            f"{each.step_seconds * 1e3:,.3f}",
            f"{each.step_error:+.1%}",
            "-" if pool is None else f"{pool * 1e3:,.3f}",
            "-" if error is None else f"{error:+.1%}",
        )
    return table


def _describe(cost: StepCost) -> str:
    return (
        f"a step: {cost.overhead_seconds * 1e6:,.0f} µs, and {cost.per_request_seconds * 1e6:,.1f} "
        f"µs per request; products {cost.weights_seconds * 1e6:,.0f} µs or "
        f"{cost.per_token_seconds * 1e6:,.2f} µs per token; attention "
        f"{cost.per_pair_seconds * 1e9:,.2f} ns per pair of a prompt's tokens and "
        f"{cost.per_context_token_seconds * 1e9:,.2f} ns per token of an answer's context"
    )
