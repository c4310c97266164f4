"""Tests in a real cluster that each request has one trace over all processes, and that the roles
export all metrics which dashboards, alerts and docs/metrics.md name."""

import json
from collections import Counter
from collections.abc import Iterator

import pytest

from testkit.local_cluster import LocalCluster
from tests.observability import (
    WHOLE,
    PendingStream,
    kill_midway,
    missing_metrics,
    run_observed_cluster,
    trace_errors,
    trace_of,
)
from tests.otlp_collector import Collector
from tests.scrape import Scrape, scrape

pytestmark = pytest.mark.timeout(300)
Watched = tuple[LocalCluster, Collector]


@pytest.fixture(scope="module")
def observed() -> Iterator[Watched]:
    with run_observed_cluster() as both:
        yield both


def test_a_request_is_one_trace_over_four_processes(observed: Watched) -> None:
    cluster, collector = observed
    stream = PendingStream(cluster, 12)
    stream.finish()
    tree = trace_of(collector, stream.request_id, WHOLE)
    assert trace_errors(tree, WHOLE) == [], tree.describe()
    services = {span.service for span in tree.spans}
    assert services == {"baton-router", "baton-conductor", "baton-prefill", "baton-decode"}
    [root] = tree.roots
    assert all(root.begin <= span.begin for span in tree.spans)


def test_every_documented_metric_exists(observed: Watched) -> None:
    cluster, _ = observed
    found = Scrape()
    scrape(cluster, found)
    assert set(found.families) == {"router", "conductor", "prefill", "decode", "kvstore"}
    assert missing_metrics(found) == []


def test_a_failover_appears_in_the_trace_and_the_log(observed: Watched) -> None:
    """This must be the last test, because it kills a worker."""
    cluster, collector = observed
    stream = kill_midway(cluster, 150)
    stream.finish()
    names = Counter(request=1, attempt=2, place=2, decode=1)
    tree = trace_of(collector, stream.request_id, names)
    assert trace_errors(tree, names) == [], tree.describe()
    first, second = (span for span in tree.spans if span.name == "attempt")
    assert first.error.startswith(f"lost worker {stream.decode}") and not second.error
    lines = (cluster.home / "clusters" / "default" / "logs" / "router.log").read_text()
    events = [json.loads(line) for line in lines.splitlines()]
    [failover] = [event for event in events if event["event"] == "request_fails_over"]
    assert failover["request_id"] == stream.request_id
    assert failover["trace_id"] == tree.roots[0].trace_id
    assert (failover["id"], failover["role"]) == ("router", "router")
