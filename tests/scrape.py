"""Scrapes the metrics of all processes of a running cluster, with their names and labels."""

import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from testkit.local_cluster import LocalCluster

TARGET_LABELS = frozenset(
    {"instance", "job", "namespace", "pod", "baton_dev_cluster", "baton_dev_role", "baton_dev_pool"}
)
"""Labels that Prometheus adds to all metrics, as configured by the chart's monitors."""

_TYPE = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
_PARTS = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}


@dataclass(slots=True)
class Scrape:
    """The metrics of a cluster. ``families`` has the declared metrics of each role. ``labels`` has
    the label names of each metric that has samples. ``num_series`` has the number of series of each
    process."""

    families: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    names: set[str] = field(default_factory=set)
    labels: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    num_series: dict[str, int] = field(default_factory=dict)

    def add(self, role: str, process: str, text: str) -> None:
        for name, kind in _TYPE.findall(text):
            self.families[role].add(name)
            self.names.update(f"{name}{part}" for part in _PARTS.get(kind, ("",)))
        count = 0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                count += 1
                self.names.add(sample.name)
                self.labels[sample.name] |= sample.labels.keys()
        self.num_series[process] = count

    @property
    def own(self) -> set[str]:
        """Return Baton's own metric families of all roles."""
        return {name for names in self.families.values() for name in names if name[:6] == "baton_"}

    def lacks(self, metric: str, labels: frozenset[str]) -> Iterator[str]:
        """Yield ``metric`` if it doesn't exist, or else each of ``labels`` that it lacks. The
        labels of a metric without samples are unknown, so they are not checked."""
        if metric not in self.names:
            yield metric
        elif metric in self.labels:
            for label in sorted(labels - self.labels[metric] - TARGET_LABELS):
                yield f"{metric}{{{label}}}"


def scrape(cluster: LocalCluster, found: Scrape) -> None:
    """Scrape every serving process that has an ops server, and add the result to ``found``."""
    for process in cluster.status()["processes"]:
        if process["ops"] and process["state"] == "serving":
            with urllib.request.urlopen(f"http://{process['ops']}/metrics", timeout=30) as answer:
                found.add(process["role"], process["id"], answer.read().decode())
