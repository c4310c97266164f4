"""Tests the chart's pods under load, in a short version of ``python -m tools.kube_lifecycle``."""

from collections.abc import Iterator

import pytest

from tests.kube.accounts import user_of
from tests.kube.cluster import cluster
from tests.kube.node.network import missing_requirement
from tools.kube_lifecycle import compare_rights
from tools.kube_release import Release
from tools.streams import make_request_bodies, record_answers, traffic

pytest.importorskip("helm_python")

VALUES = {
    "replicasManagedBy": "external",
    "conductor": {"replicas": 1},
    "pools": {"decode": {"replicas": 2}},
}


@pytest.fixture
def release() -> Iterator[Release]:
    if why := missing_requirement():
        pytest.skip(why)
    with cluster() as kube:
        release = Release(kube, "default", "baton")
        release.install(VALUES)
        yield release


@pytest.mark.timeout(240)
def test_the_chart_serves_and_a_worker_drains_without_disturbing_streams(release: Release) -> None:
    """``helm test`` passes. Then a named worker drains with only the conductor's permissions while
    answers stream; all their tokens are right."""
    assert release.test().startswith("demo: ")
    questions = record_answers(release.url, make_request_bodies(6, 1, 30, 60), 2)
    with traffic(release.url, questions, 2) as answers:
        victim = min(release.workers("decode"))
        others = release.workers("decode") - {victim}
        release.baton("drain", victim, "--on", "kubernetes")
        release.wait_for_sizes({"decode": 1})
    assert release.workers("decode") == others
    assert answers and all(answer.is_right for answer in answers), [a.error for a in answers]
    used = compare_rights(release.kube, "default", "baton-conductor")
    assert used["refused"] == []
    assert set(used["unused"]) <= {"delete pods", "get deployments/scale baton-prefill",
                                   "update deployments/scale baton-prefill"}, used  # fmt: skip
    users = {call.user for call in release.kube.server.accounts.calls}
    assert users == {user_of("default", "baton-conductor")}, "only the conductor calls the API"
