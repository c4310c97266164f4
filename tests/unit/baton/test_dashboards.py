"""Tests dashboards and alert rules: panels have room and queries, and all queries are valid
PromQL."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from baton.errors import Invalid
from tests.observability import RULES, alerts, dashboards, queries, used_metrics
from tests.promql import MetricUse, uses
from tests.scrape import Scrape

ROOT = Path(__file__).parents[3]
SEVERITIES = {"critical", "warning", "info"}
DASHBOARDS = dashboards()
COLUMNS = 24


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_do_not_overlap_and_have_queries(name: str) -> None:
    described = DASHBOARDS[name]
    assert described["uid"] == f"baton-{name}"
    taken: set[tuple[int, int]] = set()
    numbers = [panel["id"] for panel in described["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in described["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= COLUMNS
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or all(target["expr"] for target in panel["targets"])
        # No data source may be fixed: every Grafana has its own.
        sources = [each["datasource"] for each in (panel, *panel.get("targets", ()))
                   if panel["type"] != "row"]  # fmt: skip
        assert all(each == {"type": "prometheus", "uid": "${datasource}"} for each in sources)


def test_every_query_filters_by_cluster() -> None:
    for dashboard in DASHBOARDS.values():
        for query in queries(dashboard):
            for use in uses(query):
                assert "baton_dev_cluster" in use.labels, query


# -- alerts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_alert_has_severity_annotations_and_runbook_link(alert: dict[str, Any]) -> None:
    assert set(alert) == {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Baton[A-Za-z]+", alert["alert"])
    assert re.fullmatch(r"\d+m", alert["for"])
    assert set(alert["labels"]) == {"severity"} and alert["labels"]["severity"] in SEVERITIES
    notes = alert["annotations"]
    assert set(notes) == {"summary", "description", "runbook"}
    assert notes["runbook"] == f"docs/runbook.md#{alert['alert'].lower()}"
    assert len(notes["summary"]) < 100 and notes["description"].endswith(".")
    assert uses(alert["expr"])
    # The groupings in the expression must keep the labels that the summary uses.
    for label in re.findall(r"\$labels\.(\w+)", json.dumps(notes)):
        grouped = re.findall(r"by \(([^)]*)\)", alert["expr"])
        assert not grouped or any(label in each.split(", ") for each in grouped), label


def test_the_runbook_has_a_section_for_each_alert_and_no_other() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    sections = re.split(r"^## (\w+)$", page, flags=re.MULTILINE)[1:]
    sections_by_name = dict(zip(sections[::2], sections[1::2], strict=True))
    names = [alert["alert"] for alert in alerts()]
    assert len(set(names)) == len(names) >= 20
    assert sorted(sections_by_name) == sorted(names)
    for name, text in sections_by_name.items():
        assert all(part in text for part in ("**Means**", "**Look**", "**Do**")), name
    for link in re.findall(r"\(#(\w+)\)", page):
        assert link in {name.lower() for name in names}, link


def test_a_rejected_config_file_raises_an_alert() -> None:
    (alert,) = [each for each in alerts() if "baton_settings_pending" in each["expr"]]
    assert alert["expr"] == 'baton_settings_pending{reason="rejected"} > 0'
    assert (alert["for"], alert["labels"]) == ("5m", {"severity": "warning"})


def test_rule_files_have_groups_at_the_top_level() -> None:
    for path in RULES.glob("*.yaml"):
        assert "\ngroups:\n" in "\n" + path.read_text(encoding="utf-8"), path.name


# -- the check itself -------------------------------------------------------------------------


def test_metrics_and_labels_of_an_expression_are_found() -> None:
    assert uses('sum by (le) (rate(a_bucket{x="1"}[5m])) / b') == [
        MetricUse("a_bucket", frozenset({"le", "x"})),
        MetricUse("b", frozenset()),
    ]
    assert uses('label_replace(max by (role) (a), "pool", "$1", "role", "(.+)")') == [
        MetricUse("a", frozenset({"role"}))
    ]
    assert uses('max by (pool) (label_replace(a, "pool", "$1", "role", "(.+)"))') == [
        MetricUse("a", frozenset())
    ]
    with pytest.raises(Invalid, match="sum by"):
        uses("sum by (a")


def test_missing_metrics_of_a_scrape_are_listed() -> None:
    found = Scrape()
    found.add(
        "router",
        "router-0",
        "# HELP a_total A.\n# TYPE a_total counter\na_total{x=\"1\"} 2.0\n"
        "# HELP h H.\n# TYPE h histogram\n"
        "# HELP baton_c_total C.\n# TYPE baton_c_total counter\n",
    )  # fmt: skip
    assert list(found.lacks("a_total", frozenset({"x", "instance"}))) == []
    assert list(found.lacks("a_total", frozenset({"y"}))) == ["a_total{y}"]
    assert list(found.lacks("h_bucket", frozenset({"le"}))) == []
    assert list(found.lacks("missing", frozenset())) == ["missing"]
    assert list(found.lacks("baton_c_total", frozenset({"any"}))) == []
    assert found.own == {"baton_c_total"}
    assert found.num_series == {"router-0": 1}


def test_dashboards_and_alerts_use_many_metrics() -> None:
    assert len({use.metric for _, use in used_metrics()}) > 60
