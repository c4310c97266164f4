"""Generates Grafana dashboards from short descriptions of their panels and queries."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

COLUMNS = 24
HEIGHT = 8
SCHEMA_VERSION = 39
CLUSTER = 'baton_dev_cluster=~"$cluster"'
_METRIC = re.compile(r"\b(baton_(?!dev_)[a-z_]+)(\{)?")
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class PromQuery:
    """A PromQL expression without the matcher for the cluster; :attr:`of_cluster` adds the matcher
    to each of Baton's metrics. ``legend`` names the plotted lines, with labels in braces."""

    expr: str
    legend: str = ""

    @property
    def of_cluster(self) -> str:
        """Return the expression with the matcher for ``$cluster``."""

        def matched(found: re.Match[str]) -> str:
            name, brace = found.groups()
            return f"{name}{{{CLUSTER}," if brace else f"{name}{{{CLUSTER}}}"

        return _METRIC.sub(matched, self.expr)


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel. ``kind`` (timeseries or stat) and ``unit`` have Grafana's values. ``text`` explains
    how to read the panel. ``width`` is in 24ths of the dashboard."""

    title: str
    queries: Sequence[PromQuery]
    unit: str = "short"
    text: str = ""
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    most: float | None = None
    least: float | None = 0

    def to_json(self, number: int, x: int, y: int) -> dict[str, Any]:
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.text,
            "datasource": _DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": self._field(), "overrides": []},
            "options": self._options(),
            "targets": [
                {
                    "refId": chr(ord("A") + index),
                    "datasource": _DATASOURCE,
                    "expr": query.of_cluster,
                    "legendFormat": query.legend or "__auto",
                    "instant": self.kind != "timeseries",
                    "range": self.kind == "timeseries",
                }
                for index, query in enumerate(self.queries)
            ],
        }

    @property
    def height(self) -> int:
        return HEIGHT // 2 if self.kind == "stat" else HEIGHT

    def _field(self) -> dict[str, Any]:
        drawn: dict[str, Any] = {"unit": self.unit}
        if self.least is not None:
            drawn["min"] = self.least
        if self.most is not None:
            drawn["max"] = self.most
        if self.kind == "timeseries":
            drawn["custom"] = {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 40 if self.stacked else 5,
                "showPoints": "never",
                "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
            }
        return drawn

    def _options(self) -> dict[str, Any]:
        if self.kind == "timeseries":
            legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduce, "textMode": "auto", "colorMode": "none"}


@dataclass(frozen=True, slots=True)
class PanelRow:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Variable:
    """A dashboard variable, with which a reader selects one, several or all values of a label."""

    name: str
    metric: str
    label: str

    def to_json(self) -> dict[str, Any]:
        query = f"label_values({self.metric}, {self.label})"
        return {
            "type": "query",
            "name": self.name,
            "label": self.name,
            "datasource": _DATASOURCE,
            "query": {"query": query, "refId": self.name},
            "definition": query,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "refresh": 2,
            "sort": 1,
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard. ``name`` is its file name, and its uid in Grafana."""

    name: str
    title: str
    rows: Sequence[PanelRow]
    variables: Sequence[Variable] = field(default_factory=tuple)

    @property
    def queries(self) -> Iterator[PromQuery]:
        for row in self.rows:
            for panel in row.panels:
                yield from panel.queries

    def render(self) -> str:
        return json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"

    def to_json(self) -> dict[str, Any]:
        cluster = Variable("cluster", "baton_program_state", "baton_dev_cluster")
        source = {"type": "datasource", "name": "datasource", "label": "Prometheus"}
        return {
            "uid": f"baton-{self.name}",
            "title": f"Baton / {self.title}",
            "tags": ["baton"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "refresh": "30s",
            "time": {"from": "now-3h", "to": "now"},
            "timezone": "browser",
            "graphTooltip": 1,
            "links": [
                {
                    "type": "dashboards",
                    "title": "Baton",
                    "tags": ["baton"],
                    "asDropdown": True,
                    "keepTime": True,
                    "includeVars": True,
                }
            ],
            "templating": {
                "list": [
                    {**source, "query": "prometheus", "refresh": 1},
                    *(variable.to_json() for variable in (cluster, *self.variables)),
                ]
            },
            "annotations": {"list": []},
            "panels": list(self._panels()),
        }

    def _panels(self) -> Iterator[dict[str, Any]]:
        """Lay out the panels: rows from top to bottom, panels from left to right."""
        number, y = 0, 0
        for row in self.rows:
            number += 1
            yield _row(row.title, number, y)
            x, y, tallest = 0, y + 1, 0
            for panel in row.panels:
                if x + panel.width > COLUMNS:
                    x, y, tallest = 0, y + tallest, 0
                number += 1
                yield panel.to_json(number, x, y)
                x, tallest = x + panel.width, max(tallest, panel.height)
            y += tallest


def _row(title: str, number: int, y: int) -> dict[str, Any]:
    place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": place,
        "panels": [],
    }
