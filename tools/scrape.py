"""What all programs of a running cluster tell Prometheus: names, and the labels of each."""

import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from tools.local_cluster import LocalCluster

TARGET_LABELS = frozenset(
    {"instance", "job", "namespace", "pod", "baton_dev_cluster", "baton_dev_role", "baton_dev_pool"}
)
"""That Prometheus adds to whatever it scrapes, as the chart's monitors have it."""

_TYPE = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
_PARTS = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}


@dataclass(slots=True)
class Scrape:
    """``families`` by role, as each declares them; ``labels`` of every name that had a sample."""

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
        """Families of ours, over all roles."""
        return {name for names in self.families.values() for name in names if name[:6] == "baton_"}

    def lacks(self, metric: str, labels: frozenset[str]) -> Iterator[str]:
        """What of a use is not there. Of a metric without samples nobody knows the labels."""
        if metric not in self.names:
            yield metric
        elif metric in self.labels:
            for label in sorted(labels - self.labels[metric] - TARGET_LABELS):
                yield f"{metric}{{{label}}}"


def scrape(cluster: LocalCluster, found: Scrape) -> None:
    """Adds what every process tells that serves, and has an ops server."""
    for process in cluster.status()["processes"]:
        if process["ops"] and process["state"] == "serving":
            with urllib.request.urlopen(f"http://{process['ops']}/metrics", timeout=30) as answer:
                found.add(process["role"], process["id"], answer.read().decode())
