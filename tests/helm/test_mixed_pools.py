"""Tests releases with pools of mixed workers, alone and beside prefill and decode workers."""

import json

from tests.helm.chart import make_values, render

ONLY_MIXED = make_values(
    pools__prefill__enabled=False, pools__decode__enabled=False, pools__mixed__role="mixed"
)


def test_a_release_can_have_mixed_workers_only() -> None:
    release = render(ONLY_MIXED)
    workers = [pod for pod in release.serving() if pod.role in ("prefill", "decode", "mixed")]
    assert [pod.name for pod in workers] == ["demo-baton-mixed"]
    assert workers[0].main["command"][:3] == ["baton", "serve", "mixed"]
    conductor = release.one("Deployment", "demo-baton-conductor")
    assert "mixed=mixed/demo-baton-mixed" in json.dumps(conductor)


def test_a_hybrid_release_lets_all_its_workers_reach_each_other() -> None:
    values = make_values(pools__mixed__role="mixed", networkPolicy__enabled=True)
    release = render(values)
    roles = {pod.role for pod in release.serving()}
    assert {"prefill", "decode", "mixed"} <= roles
    policy = release.one("NetworkPolicy", "demo-baton-workers")
    [selected] = policy["spec"]["podSelector"]["matchExpressions"]
    assert selected["values"] == ["prefill", "decode", "mixed", "kvstore"]
