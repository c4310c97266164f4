"""Install the Helm chart on this machine, and resize, drain and upgrade the release under load.

    python -m tests.kube.lifecycle [--helm 3|4] [--streams 4] [--seed 1] [--only STEP,...]
        [--logs FOLDER]

Helm (4 by default) installs the chart on the API server, controllers and kubelet of ``tests/kube``.
Each step in ``STEPS`` runs while answers stream through the router's Service. Every token is
compared with the answer of the undisturbed cluster. After each step every object must have the
deployed revision. At the end, the rights of the conductor's Role are compared with its recorded API
calls. Prints a line per step, and JSON as the last line. Exits with 1 if a step failed, if an
answer failed or differs, or if the Role lacks a right or has an unused one. Needs root.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testkit.machine import SYSTEM_CLOCK, describe
from testkit.streams import StreamedAnswer, make_request_bodies, record_answers, traffic
from tests.helm.helm3_parity import fetch_helm3
from tests.kube.accounts import unused_permissions, user_of
from tests.kube.cluster import Cluster, cluster
from tests.kube.helm_clients import Helm, Helm3, Helm4, HelmFailed
from tests.kube.kinds import ROLE
from tests.kube.node.network import missing_requirement
from tests.kube.release_journey import Release

SHORTEST, LONGEST = 30, 90
MAX_PRINTED_FAILURES = 5
"""How many of the failed answers of a step are printed."""

VALUES: dict[str, Any] = {
    "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 2}},
    "kvstore": {
        "enabled": True, "memory": "256Mi", "disk": {"size": "1Gi"},
        "resources": {"requests": {"memory": "800Mi"}, "limits": {"memory": "1Gi"}},
    },
}  # fmt: skip
AUTOSCALED = {
    "conductor": {
        "autoscale": {"mode": "on", "prefill": {"min": 2}, "decode": {"max": 1}, "maxWorkers": 4},
        "settings": {
            "autoscale_interval_seconds": 2, "autoscale_stable_seconds": 2,
            "autoscale_cooldown_seconds": 2, "autoscale_shrink_seconds": 5,
        },
    }
}  # fmt: skip
"""Values with limits that soon force the autoscaler to grow one pool and shrink the other."""


@dataclass
class LongRunStep:
    """The result of one step. ``failure`` says why the step failed; it is empty if it did not fail.
    ``longest_gap_seconds`` is the longest inter-token latency of an answer that ended during the
    step."""

    name: str
    seconds: float = 0.0
    answers: int = 0
    failed: int = 0
    longest_gap_seconds: float = 0.0
    failure: str = ""
    result: dict[str, Any] = field(default_factory=dict)


# -- steps: each returns its results, and raises AssertionError or TimeoutError --------------------


def helm_test(release: Release) -> dict[str, Any]:
    release.test()
    return {}


def scale_up(release: Release) -> dict[str, Any]:
    """Grow both pools at once by writing the scale of their Deployments, like ``kubectl scale``."""
    return {"seconds": release.scale({"prefill": 2, "decode": 3})}


def scale_down(release: Release) -> dict[str, Any]:
    """Shrink both pools. Kubernetes picks the pods to remove; each of them drains at
    SIGTERM."""
    return {"seconds": release.scale({"prefill": 1, "decode": 2})}


def baton_scale(release: Release) -> dict[str, Any]:
    """Run ``baton scale`` in a conductor's pod, with the rights of its Role."""
    up = release.baton("scale", "decode=3", "prefill=2", "--on", "kubernetes")
    release.wait_for_sizes({"prefill": 2, "decode": 3})
    down = release.baton("scale", "decode=2", "prefill=1", "--on", "kubernetes")
    release.wait_for_sizes({"prefill": 1, "decode": 2})
    return {"output": [up, down]}


def drain_named_worker(release: Release) -> dict[str, Any]:
    """Drain a named worker: its pod, and no other one, must be removed."""
    return release.drain_named_worker("decode", 3)


def reuse_after_drain(release: Release) -> dict[str, Any]:
    """Remove a decode worker. The KV of its answers must still be found in the store."""
    return release.reuse_after_drain()


def drain_with_pending_pod(release: Release) -> dict[str, Any]:
    """Drain a named worker while another pod is unscheduled. Kubernetes removes the unscheduled pod
    first, whatever the deletion-cost annotations say; the named worker's pod is drained and
    replaced."""
    return release.drain_with_pending_pod("decode")


def upgrade(release: Release) -> dict[str, Any]:
    """Change a setting of workers. Only their pods are replaced, one after the other."""
    return release.upgrade({"settings": {"max_sequences": 24}})


def log_level(release: Release) -> dict[str, Any]:
    """Change the log level: no pod may be replaced."""
    result = release.upgrade({"logs": {"level": "debug"}})
    assert result["replaced"] == 0, result
    return result


def image(release: Release) -> dict[str, Any]:
    """Upgrade the image. Every pod must be replaced, and the pools must keep their sizes."""
    release.scale({"decode": 3})
    sizes = release.sizes()
    result = release.upgrade({"images": {"cpu": {"tag": "next"}}})
    release.wait_for_sizes(sizes)
    assert result["replaced"] == result["of"], result
    return result | {"sizes": sizes}


def roll_back(release: Release) -> dict[str, Any]:
    """Roll back to the first revision. The pools must keep their sizes."""
    sizes = release.sizes()
    result = release.roll_back(1)
    release.wait_for_sizes(sizes)
    return result | {"sizes": sizes}


def hpa(release: Release) -> dict[str, Any]:
    """Let a HorizontalPodAutoscaler grow a pool; an upgrade and a rollback must keep its size."""
    size = len(release.workers("decode"))
    hpa = {"enabled": True, "minReplicas": size + 1, "maxReplicas": size + 1}
    release.upgrade({"pools": {"decode": {"hpa": hpa}}})
    release.wait_for_sizes({"decode": size + 1})
    release.upgrade({"images": {"cpu": {"tag": "other"}}})
    release.roll_back(release.revision - 1)
    release.wait_for_sizes({"decode": size + 1})
    release.upgrade({"pools": {"decode": {"hpa": {"enabled": False}}}})
    release.scale({"decode": size})
    return {"size": size + 1}


def two_owners(release: Release) -> dict[str, Any]:
    """Upgrade with values that give a pool's size two owners, which must be rejected, and then with
    one owner, which must keep the size."""
    return release.two_owners("decode")


def two_models(release: Release) -> dict[str, Any]:
    """Serve a second model for a while, with pools of its own."""
    return release.serve_two_models("chat")


def drain_node(release: Release) -> dict[str, Any]:
    return release.drain_node()


def autoscale(release: Release) -> dict[str, Any]:
    """Autoscale: one conductor leads, grows one pool and shrinks the other."""
    result = release.upgrade(AUTOSCALED)
    release.wait_for_sizes({"prefill": 2, "decode": 1})
    return result | {"leader": release.leader()}


def reinstall(release: Release) -> dict[str, Any]:
    """Uninstall, and install again: the new release finds the KV of the old one in the store's
    volumes. Runs without traffic."""
    return release.reinstall()


STEPS: dict[str, Callable[[Release], dict[str, Any]]] = {
    "helm_test": helm_test,
    "scale_up": scale_up,
    "scale_down": scale_down,
    "baton_scale": baton_scale,
    "drain_worker": drain_named_worker,
    "store_reuse": reuse_after_drain,
    "pending_pod": drain_with_pending_pod,
    "upgrade": upgrade,
    "log_level": log_level,
    "image": image,
    "roll_back": roll_back,
    "hpa": hpa,
    "two_owners": two_owners,
    "two_models": two_models,
    "drain_node": drain_node,
    "autoscale": autoscale,
    "reinstall": reinstall,
}
WITHOUT_TRAFFIC = ("reinstall",)
"""Steps during which there is no router; they come last."""


USE_ALL = {"pending_pod", "autoscale"}
"""Steps that together use every right of the Role: after them, no right may be unused."""


def run_step(name: str, release: Release, answers: Sequence[StreamedAnswer]) -> LongRunStep:
    """Run one step and print its result. If the step fails, record the failure in the result, so
    that the run goes on."""
    began, before = SYSTEM_CLOCK(), len(answers)
    step = LongRunStep(name)
    try:
        step.result = STEPS[name](release)
        differing = release.differences()
        assert not differing, f"not of the deployed revision: {', '.join(differing)}"
    except (AssertionError, TimeoutError, RuntimeError, HelmFailed) as error:
        step.failure = f"{type(error).__name__}: {error}"
    step.seconds = SYSTEM_CLOCK() - began
    step.answers = len(answers) - before
    wrong = [answer for answer in answers[before:] if not answer.is_right]
    step.failed = len(wrong)
    step.longest_gap_seconds = longest_gap(answers[before:])
    for answer in wrong[:MAX_PRINTED_FAILURES]:
        print(f"wrong answer: {answer.error or 'its tokens differ'}")
    good = "ok" if not step.failure and not step.failed else "FAILED"
    print(
        f"{name:12} {step.seconds:6.1f} s  {step.answers:4} answers, {step.failed} failed,"
        f" longest gap {step.longest_gap_seconds:.1f} s  {good}"
        f"  {json.dumps(step.result)}{step.failure}",
        flush=True,
    )
    return step


def longest_gap(answers: Sequence[StreamedAnswer]) -> float:
    return max((answer.max_inter_token_seconds for answer in answers), default=0.0)


def compare_rights(kube: Cluster, namespace: str, account: str) -> dict[str, list[str]]:
    """Return the API calls that an account made, the rights of its Role that it did not use, and
    the calls that were refused."""
    user = user_of(namespace, account)
    calls = [call for call in kube.server.accounts.calls if call.user == user]
    rules = kube.api.store.get(ROLE, namespace, account)["rules"]
    refused = [call for call in kube.server.accounts.refused if call.user == user]
    return {
        "used": sorted({f"{call.verb} {call.resource} {call.name}".strip() for call in calls}),
        "unused": unused_permissions(rules, calls),
        "refused": sorted({f"{call.verb} {call.resource} {call.name}" for call in refused}),
    }


def keep_logs(kube: Cluster, folder: Path) -> None:
    """Copy the logs of all pods, including deleted ones, as ``<uid>-<container>.log``."""
    folder.mkdir(parents=True, exist_ok=True)
    for log in kube.folder.glob("**/pods/*/*.log"):
        shutil.copy(log, folder / f"{log.parent.name}-{log.name}")


def run_steps(
    kube: Cluster, names: Sequence[str], streams: int, seed: int, helm: Helm
) -> dict[str, Any]:
    """Install the chart and run all steps under load."""
    release = Release(kube, "default", "baton", helm)
    began = SYSTEM_CLOCK()
    release.install(VALUES)
    print(f"installed and ready in {SYSTEM_CLOCK() - began:.1f} s:\n{kube.describe()}", flush=True)
    installed = SYSTEM_CLOCK() - began
    questions = record_answers(
        release.url, make_request_bodies(24, seed, SHORTEST, LONGEST), streams
    )
    with traffic(release.url, questions, streams) as answers:
        steps = [run_step(name, release, answers) for name in names if name not in WITHOUT_TRAFFIC]
    # While a release is being uninstalled, its pods may outlive their Role.
    rights = compare_rights(kube, "default", "baton-conductor")
    steps += [run_step(name, release, ()) for name in names if name in WITHOUT_TRAFFIC]
    wrong = [answer for answer in answers if not answer.is_right]
    print(f"Role: used {rights['used']}; unused {rights['unused']}; refused {rights['refused']}")
    too_much = rights["unused"] if set(names) >= USE_ALL else []
    ok = not (wrong or too_much or rights["refused"] or any(step.failure for step in steps))
    return {
        "ok": ok,
        "seed": seed,
        "install_seconds": installed,
        "answers": len(answers),
        "failed": sum(bool(answer.error) for answer in wrong),
        "changed": sum(not answer.error for answer in wrong),
        "longest_gap_seconds": longest_gap(answers),
        "restarts": release.restarts(),
        "steps": {step.name: {"seconds": step.seconds, "answers": step.answers,
                              "failed": step.failed, "why": step.failure,
                              "longest_gap_seconds": step.longest_gap_seconds} for step in steps},
        "rights": rights,
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--helm", type=int, choices=[3, 4], default=4)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(STEPS), help="comma-separated names of steps")
    parser.add_argument("--logs", type=Path, help="folder for all pods' logs")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"unknown step {unknown[0]}; the steps are {', '.join(STEPS)}")
    if why := missing_requirement():
        print(f"this machine can't run the nodes: {why}", file=sys.stderr)
        return 2
    print(describe())
    print(f"seed {options.seed}")
    with cluster() as kube, tempfile.TemporaryDirectory() as folder:
        helm: Helm = Helm4(kube.kubeconfig, "default")
        if options.helm == 3:
            helm = Helm3(fetch_helm3(Path(folder)), kube.kubeconfig, "default")
        report = run_steps(kube, names, options.streams, options.seed, helm)
        if options.logs is not None:
            keep_logs(kube, options.logs)
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
