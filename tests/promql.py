"""Finds the metrics and labels that a PromQL expression uses, with Prometheus' own parser."""

from collections.abc import Iterator
from dataclasses import dataclass

import promql_parser as promql

from baton.errors import Invalid


@dataclass(frozen=True, slots=True)
class MetricUse:
    """A metric, and the ``labels`` that it must have because its matchers, or groupings around it,
    name them."""

    metric: str
    labels: frozenset[str]


def uses(text: str) -> list[MetricUse]:
    """Return the metrics that an expression uses, in order. ``text`` may contain Grafana variables.
    Raises Invalid if it can't be parsed."""
    try:
        expr = promql.parse(text.replace("$__rate_interval", "5m"))
    except ValueError as error:
        raise Invalid(f"the PromQL expression {text!r} can't be parsed: {error}") from error
    return list(_uses(expr, frozenset()))


def _uses(expr: promql.Expr, grouped: frozenset[str]) -> Iterator[MetricUse]:
    match expr:
        case promql.VectorSelector():
            named = {matcher.name for matcher in expr.matchers.matchers}
            yield MetricUse(str(expr.name), frozenset(named) | grouped)
        case promql.MatrixSelector():
            yield from _uses(expr.vector_selector, grouped)
        case promql.AggregateExpr():
            labels = expr.modifier.labels if expr.modifier is not None else ()
            yield from _uses(expr.expr, grouped | frozenset(labels))
        case promql.Call():
            created_labels = _labels_made_by(expr)
            for argument in expr.args:
                yield from _uses(argument, grouped - created_labels)
        case promql.BinaryExpr():
            yield from _uses(expr.lhs, grouped)
            yield from _uses(expr.rhs, grouped)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            yield from _uses(expr.expr, grouped)


def _labels_made_by(call: promql.Call) -> frozenset[str]:
    """Return the labels that the call adds to the series of its argument: one for
    ``label_replace``, none for any other function. The metric itself need not have them."""
    if call.func.name != "label_replace":
        return frozenset()
    label = call.args[1]
    assert isinstance(label, promql.StringLiteral)
    return frozenset({label.val})
