"""The chart's long run: installed, loaded, resized, drained, upgraded, on this machine's processes.

    python -m tools.kube_journey [--streams 4] [--seed 1] [--only STEP,...] [--logs FOLDER]

Helm 4 installs the chart on an API server, controllers and a kubelet of our own (``tests/kube``),
and while answers stream through the router's Service, each step of ``STEPS`` happens. Every token
is compared with the answer of the undisturbed cluster. At the end the conductor's Role is held
against the calls that were recorded. Prints a line per step, and JSON as the last line; exits with
1 when an answer failed or is another one, or a step did not do what it should. Needs root.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helm_python import HelmError

from benchmarks.machine import SYSTEM_CLOCK, describe
from tests.kube.accounts import unused, user_of
from tests.kube.cluster import Cluster, cluster
from tests.kube.kinds import ROLE
from tests.kube.node.network import why_not
from tools.kube_release import Release
from tools.streams import StreamedAnswer, make_questions, record_answers, traffic

SHORTEST, LONGEST = 30, 90
SHOWN = 5
"""Of the answers that fail in a step."""

VALUES: dict[str, Any] = {
    "replicasManagedBy": "external",
    "router": {"replicas": 2},
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
            "autoscale_seconds": 2, "autoscale_stable_seconds": 2,
            "autoscale_cooldown_seconds": 2, "autoscale_shrink_seconds": 5,
        },
    }
}  # fmt: skip
"""Bounds that force it to grow one pool and to shrink the other, soon."""


@dataclass
class LongRunStep:
    """What happened, and how long it took; ``why`` it did not do what it should."""

    name: str
    seconds: float = 0.0
    answers: int = 0
    failed: int = 0
    why: str = ""
    told: dict[str, Any] = field(default_factory=dict)


# -- steps: each returns what it has to tell, and raises AssertionError or TimeoutError ------------


def helm_test(release: Release) -> dict[str, Any]:
    return {"said": release.test()}


def scale_up(release: Release) -> dict[str, Any]:
    """Each pool, as ``kubectl scale`` does it, at once."""
    return {"seconds": release.scale({"prefill": 2, "decode": 3})}


def scale_down(release: Release) -> dict[str, Any]:
    """Kubernetes picks who goes; each drains in its preStop."""
    return {"seconds": release.scale({"prefill": 1, "decode": 2})}


def baton_scale(release: Release) -> dict[str, Any]:
    """In a conductor's pod, by its rights."""
    up = release.baton("scale", "decode=3", "prefill=2", "--on", "kubernetes")
    release.settled({"prefill": 2, "decode": 3})
    down = release.baton("scale", "decode=2", "prefill=1", "--on", "kubernetes")
    release.settled({"prefill": 1, "decode": 2})
    return {"said": [up, down]}


def directed(release: Release) -> dict[str, Any]:
    """The one that is named goes, and no other."""
    return release.directed("decode", 3)


def remembered(release: Release) -> dict[str, Any]:
    """What a decode worker has written is found after it has gone."""
    return release.remembered()


def usurped(release: Release) -> dict[str, Any]:
    """A pod without a node goes before the one that was named, whatever that costs; the named one,
    which has drained, is replaced."""
    return release.usurped("decode")


def upgrade(release: Release) -> dict[str, Any]:
    """New settings: every pod of ours is replaced, one after the other."""
    return release.upgrade({"settings": {"max_running": 24}})


def owners(release: Release) -> dict[str, Any]:
    """Two owners of a pool's size are told of each other; with one, it keeps its size."""
    return release.owners("decode")


def drain_node(release: Release) -> dict[str, Any]:
    return release.drain_node()


def autoscale(release: Release) -> dict[str, Any]:
    """One leads, grows one pool and shrinks the other."""
    told = release.upgrade(AUTOSCALED)
    release.settled({"prefill": 2, "decode": 1})
    return told | {"leader": release.leader()}


STEPS: dict[str, Callable[[Release], dict[str, Any]]] = {
    "helm_test": helm_test,
    "scale_up": scale_up,
    "scale_down": scale_down,
    "baton_scale": baton_scale,
    "directed": directed,
    "remembered": remembered,
    "usurped": usurped,
    "upgrade": upgrade,
    "owners": owners,
    "drain_node": drain_node,
    "autoscale": autoscale,
}


USE_ALL = {"usurped", "autoscale"}
"""Steps that together need all that the Role grants: after them it may grant nothing unused."""


def run_step(name: str, release: Release, answers: Sequence[StreamedAnswer]) -> LongRunStep:
    """One step, told. What goes wrong is in the step, and does not end the journey."""
    began, before = SYSTEM_CLOCK(), len(answers)
    step = LongRunStep(name)
    try:
        step.told = STEPS[name](release)
    except (AssertionError, TimeoutError, RuntimeError, HelmError) as error:
        step.why = f"{type(error).__name__}: {error}"
    step.seconds = SYSTEM_CLOCK() - began
    step.answers = len(answers) - before
    wrong = [answer for answer in answers[before:] if not answer.right]
    step.failed = len(wrong)
    for answer in wrong[:SHOWN]:
        print(f"not right: {answer.error or 'other tokens'}")
    good = "ok" if not step.why and not step.failed else "FAILED"
    print(
        f"{name:12} {step.seconds:6.1f} s  {step.answers:4} answers, {step.failed} failed  {good}"
        f"  {json.dumps(step.told)}{step.why}",
        flush=True,
    )
    return step


def rights(kube: Cluster, namespace: str, account: str) -> dict[str, list[str]]:
    """What the account's Role grants and nobody used, and what was refused."""
    user = user_of(namespace, account)
    calls = [call for call in kube.server.accounts.calls if call.user == user]
    rules = kube.api.store.get(ROLE, namespace, account)["rules"]
    refused = [call for call in kube.server.accounts.refused if call.user == user]
    return {
        "used": sorted({f"{call.verb} {call.resource} {call.name}".strip() for call in calls}),
        "unused": unused(rules, calls),
        "refused": sorted({f"{call.verb} {call.resource} {call.name}" for call in refused}),
    }


def keep_logs(kube: Cluster, folder: Path) -> None:
    """Those of pods that are gone, too: ``<uid>-<container>.log``."""
    folder.mkdir(parents=True, exist_ok=True)
    for log in kube.folder.glob("**/pods/*/*.log"):
        shutil.copy(log, folder / f"{log.parent.name}-{log.name}")


def run_steps(kube: Cluster, names: Sequence[str], streams: int, seed: int) -> dict[str, Any]:
    """All steps under load."""
    release = Release(kube, "default", "baton")
    began = SYSTEM_CLOCK()
    release.install(VALUES)
    print(f"installed and ready in {SYSTEM_CLOCK() - began:.1f} s:\n{kube.describe()}", flush=True)
    installed = SYSTEM_CLOCK() - began
    questions = record_answers(release.url, make_questions(24, seed, SHORTEST, LONGEST), streams)
    with traffic(release.url, questions, streams) as answers:
        steps = [run_step(name, release, answers) for name in names]
    wrong = [answer for answer in answers if not answer.right]
    told = rights(kube, "default", "baton-conductor")
    print(f"Role: used {told['used']}; unused {told['unused']}; refused {told['refused']}")
    gaps = max((answer.longest_gap for answer in answers), default=0.0)
    too_much = told["unused"] if set(names) >= USE_ALL else []
    ok = not (wrong or too_much or told["refused"] or any(step.why for step in steps))
    return {
        "ok": ok,
        "seed": seed,
        "install_seconds": installed,
        "answers": len(answers),
        "failed": sum(bool(answer.error) for answer in wrong),
        "changed": sum(not answer.error for answer in wrong),
        "longest_gap_seconds": gaps,
        "restarts": release.restarts(),
        "steps": {step.name: {"seconds": step.seconds, "answers": step.answers,
                              "failed": step.failed, "why": step.why} for step in steps},
        "rights": told,
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(STEPS), help="steps, by their names")
    parser.add_argument("--logs", type=Path, help="where all pods' logs are left")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"no step is called {unknown[0]}; there are {', '.join(STEPS)}")
    if why := why_not():
        print(f"this machine can't: {why}", file=sys.stderr)
        return 2
    print(describe())
    print(f"seed {options.seed}")
    with cluster() as kube:
        told = run_steps(kube, names, options.streams, options.seed)
        if options.logs is not None:
            keep_logs(kube, options.logs)
    print(json.dumps(told))
    return 0 if told["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
