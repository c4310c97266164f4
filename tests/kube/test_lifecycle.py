"""Tests the chart's pods under load. This is a short version of
``python -m tests.kube.lifecycle``."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from testkit.streams import make_request_bodies, record_answers, traffic
from tests.kube.accounts import user_of
from tests.kube.cluster import cluster
from tests.kube.lifecycle import compare_rights
from tests.kube.node.network import missing_requirement
from tests.kube.release_journey import ROLE, TIMEOUT_SECONDS, Release

pytest.importorskip("helm_python")

VALUES = {
    "router": {"replicas": 1},
    "conductor": {"replicas": 1},
    "pools": {"decode": {"replicas": 3}},
}


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    if why := missing_requirement():
        pytest.skip(why)
    with cluster() as kube:
        release = Release(kube, "default", "baton")
        release.install(VALUES)
        yield release


@pytest.mark.timeout(240)
def test_a_change_of_settings_restarts_only_what_it_must(release: Release) -> None:
    """A new log level and SLO take effect without replacing any pod. A new limit of the engine
    replaces the worker pods only."""
    live = {"logs": {"level": "debug"}, "settings": {"slo_itl_seconds": 0.5}}
    assert release.upgrade(live) == {"replaced": 0, "of": 6}
    pods = {role: release.kube.ready({ROLE: role}) for role in ("router", "conductor", "prefill")}
    for role, (pod,) in pods.items():
        release.kube.wait(partial(settings_events, release, pod), TIMEOUT_SECONDS, f"{role}'s log")
        (event,) = settings_events(release, pod)
        assert event["new"] == {"log_level": "debug", "slo_itl_seconds": 0.5}, role
        assert event["restart_needed"] == []
    assert release.upgrade({"settings": {"max_sequences": 24}}) == {"replaced": 4, "of": 6}
    for role in ("router", "conductor"):
        assert release.kube.ready({ROLE: role}) == pods[role]
    (conductor,) = pods["conductor"]
    release.kube.wait(
        lambda: len(settings_events(release, conductor)) == 2, TIMEOUT_SECONDS, "logs"
    )
    assert settings_events(release, conductor)[1]["new"] == {"max_sequences": 24}
    assert len(settings_events(release, pods["router"][0])) == 1


def settings_events(release: Release, pod: str) -> list[dict[str, Any]]:
    """Return the lines in a pod's log about changed settings."""
    lines = release.kube.kubelet.log(release.namespace, pod, "baton").splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [event for event in events if event["event"] == "settings_changed"]


@pytest.mark.timeout(240)
def test_the_chart_serves_and_workers_drain_without_disturbing_streams(release: Release) -> None:
    """``helm test`` passes. While answers stream, ``baton drain`` in the conductor's pod drains a
    named worker. Then ``baton scale``, run by an administrator on a machine without access to
    Redis, drains another worker. All tokens are right. No call of the conductor's service account
    is refused, the account uses nearly all of its rights, and no other service account calls
    Kubernetes."""
    release.test()
    questions = record_answers(release.url, make_request_bodies(6, 1, 30, 60), 2)
    with traffic(release.url, questions, 2) as answers:
        victim = min(release.workers("decode"))
        others = release.workers("decode") - {victim}
        release.baton("drain", victim, "--on", "kubernetes")
        release.wait_for_sizes({"decode": 2})
        assert release.workers("decode") == others
        output = release.baton_from_laptop("scale", "decode=1").splitlines()
        [left] = release.pods("decode")
    [gone] = others - {left["metadata"]["name"]}
    assert output[0].startswith("context test (https://")
    assert output[1].startswith(f"decode 2 → 1: deleting {gone}, which drains first, ")
    assert output[2:] == ["decode 2 → 1: done"]
    assert answers and all(answer.is_right for answer in answers), [a.error for a in answers]
    used = compare_rights(release.kube, "default", "baton-conductor")
    assert used["refused"] == []
    assert set(used["unused"]) <= {"delete pods", "update deployments/scale baton-prefill",
                                   "update deployments/scale baton-router"}, used  # fmt: skip
    users = {call.user for call in release.kube.server.accounts.calls}
    assert users == {user_of("default", "baton-conductor")}, "only the conductor calls the API"
