"""A cluster whose traces are collected, and what dashboards, alerts and docs/metrics.md name."""

import json
import os
import re
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import pause
from tests.otlp_collector import Collector, SpanTree, run_collector
from tests.promql import MetricUse, uses
from tests.scrape import Scrape

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "baton"
RULES = CHART / "rules"
LABEL_VALUES = re.compile(r"label_values\((\w+), (\w+)\)")
METRICS_PAGE = ROOT / "docs" / "metrics.md"
SECONDS = 30.0
"""The timeout for spans to arrive: each process sends them once a second."""

PROMPT = "import os\n" * 60
WHOLE = Counter(
    ("request", "tokenise", "place", "decide", "attempt", "first token", "stream",
     "prefill job", "prefill", "kv export", "decode job", "kv import", "decode")
)  # fmt: skip
"""The spans that an answer's trace must have, from all four roles."""


@contextmanager
def run_observed_cluster() -> Iterator[tuple[LocalCluster, Collector]]:
    with run_collector() as (collector, url):
        settings = {"trace_endpoint": url, "ops_port": 0, "log_format": "json"}
        with local_cluster(settings=settings) as cluster:
            wait_until_known(cluster)
            yield cluster, collector


def wait_until_known(cluster: LocalCluster) -> None:
    """Send short requests until one is placed on a prefill worker and another worker for decode:
    then the conductor knows both pools. That takes a moment, since the conductor reads the registry
    only twice a second."""
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
    while True:
        _, headers = cluster.post_with_headers("/v1/completions", body)
        if headers.get("x-baton-prefill", "") not in ("", headers.get("x-baton-decode")):
            return
        pause(0.1)


# -- traces ---------------------------------------------------------------------------------


def trace_of(collector: Collector, request_id: str, names: Counter[str]) -> SpanTree:
    """Wait for the spans in ``names``, and return the request's trace. Since the client sends no
    trace context, the trace id is the last part of the request id."""
    return SpanTree(collector.wait(names, request_id.rpartition("-")[2], SECONDS))


def trace_errors(tree: SpanTree, names: Counter[str]) -> list[str]:
    """Return what is wrong with a trace that should be one tree with the spans in ``names``."""
    faults = []
    if len(tree.roots) != 1:
        faults.append(f"{len(tree.roots)} roots")
    faults += [f"orphan: {span.name} of {span.instance}" for span in tree.orphans]
    missing = names - Counter(span.name for span in tree.spans)
    return faults + [f"missing: {name}" for name in missing]


class PendingStream:
    """An answer that is still being streamed."""

    def __init__(self, cluster: LocalCluster, max_tokens: int) -> None:
        body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body["ignore_eos"] = True
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(cluster.url + "/v1/completions", data, headers)
        self._response = urllib.request.urlopen(request, timeout=120)
        self.request_id = self._response.headers["x-baton-request-id"]
        self.decode = self._response.headers["x-baton-decode"]

    def finish(self) -> None:
        """Read the rest of the answer. Raises AssertionError if it broke off."""
        with self._response:
            assert b"data: [DONE]" in self._response.read(), "the stream broke off"


def kill_midway(cluster: LocalCluster, max_tokens: int) -> PendingStream:
    """Start an answer and kill its decode worker in the middle of it."""
    pids = {process["id"]: process["pid"] for process in cluster.status()["processes"]}
    stream = PendingStream(cluster, max_tokens)
    os.kill(pids[stream.decode], signal.SIGKILL)
    return stream


# -- metrics --------------------------------------------------------------------------------


def documented_metrics() -> set[str]:
    """Return the metrics that are listed in docs/metrics.md."""
    found: set[str] = set()
    for line in METRICS_PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            found |= set(re.findall(r"`(baton_[a-z_]+)`", line.split("|")[1]))
    return found


def alerts() -> list[dict[str, Any]]:
    rules = []
    for path in sorted(RULES.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            rules += group["rules"]
    return rules


def dashboards() -> dict[str, dict[str, Any]]:
    """Return the chart's Grafana dashboards by name."""
    files = sorted((CHART / "dashboards").glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}


def queries(dashboard: dict[str, Any]) -> list[str]:
    """Return the PromQL expressions of all panels of a dashboard."""
    panels = dashboard["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def used_metrics() -> Iterable[tuple[str, MetricUse]]:
    """Yield every use of a metric, each with the name of the dashboard or alert that uses it."""
    for name, dashboard in dashboards().items():
        for query in queries(dashboard):
            yield from ((name, use) for use in uses(query))
        for variable in dashboard["templating"]["list"]:
            for metric, label in LABEL_VALUES.findall(variable.get("definition", "")):
                yield name, MetricUse(metric, frozenset({label}))
    for alert in alerts():
        yield from ((alert["alert"], use) for use in uses(alert["expr"]))


def missing_metrics(found: Scrape) -> list[str]:
    """Return a line for each metric that a dashboard or an alert uses but that doesn't exist or
    lacks a label, for each metric that exists but is not listed in docs/metrics.md, and for each
    metric that is listed there but doesn't exist."""
    lacks = {
        f"{who}: {what}"
        for who, use in used_metrics()
        for what in found.lacks(use.metric, use.labels)
    }
    lacks |= {f"docs/metrics.md lacks {name}" for name in found.own - documented_metrics()}
    lacks |= {f"docs/metrics.md lists {name}" for name in documented_metrics() - found.own}
    return sorted(lacks)
