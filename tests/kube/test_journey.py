"""A sample of ``python -m tools.kube_journey``: the chart runs, as processes, under load."""

from collections.abc import Iterator

import pytest

from tests.kube.accounts import user_of
from tests.kube.cluster import cluster
from tests.kube.node.network import why_not
from tools.kube_journey import rights
from tools.kube_release import Release
from tools.streams import make_questions, record_answers, traffic

pytest.importorskip("helm_python")

VALUES = {
    "replicasManagedBy": "external",
    "conductor": {"replicas": 1},
    "pools": {"decode": {"replicas": 2}},
}


@pytest.fixture
def release() -> Iterator[Release]:
    if why := why_not():
        pytest.skip(why)
    with cluster() as kube:
        made = Release(kube, "default", "baton")
        made.install(VALUES)
        yield made


@pytest.mark.timeout(240)
def test_the_chart_answers_and_the_named_worker_goes_without_a_word(release: Release) -> None:
    """helm test passes; then a worker drains by name, at the conductor's rights, while streams go
    on: each of their tokens is right."""
    assert release.test().startswith("demo: ")
    questions = record_answers(release.url, make_questions(6, 1, 30, 60), 2)
    with traffic(release.url, questions, 2) as answers:
        victim = min(release.workers("decode"))
        others = release.workers("decode") - {victim}
        release.baton("drain", victim, "--on", "kubernetes")
        release.settled({"decode": 1})
    assert release.workers("decode") == others
    assert answers and all(answer.right for answer in answers), [a.error for a in answers]
    told = rights(release.kube, "default", "baton-conductor")
    assert told["refused"] == []
    assert set(told["unused"]) <= {"delete pods", "get deployments/scale baton-prefill",
                                   "update deployments/scale baton-prefill"}, told  # fmt: skip
    users = {call.user for call in release.kube.server.accounts.calls}
    assert users == {user_of("default", "baton-conductor")}, "nobody else calls"
