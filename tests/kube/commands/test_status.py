"""Tests the output and the exit codes of ``baton status --on kubernetes``, for users with different
permissions, with and without Redis."""

import asyncio
import json

import pytest

pytest.importorskip("kubernetes")
pytest.importorskip("helm_python")

from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.pending_settings import PendingSettings
from baton.core.states import Role, WorkerState
from testkit.fakes.registry import MemoryRegistry
from tests.helm.chart import NAMESPACE as HOME
from tests.helm.chart import make_values
from tests.kube import instant
from tests.kube.commands.cluster import CLUSTER, Baton, Kube
from tests.kube.commands.rules import PODS, WORKLOADS


def test_status_names_what_it_looks_at(kube: Kube, baton: Baton) -> None:
    code, out, err = baton("status")
    assert (code, err) == (0, [])
    assert out[:2] == [baton.location(), "decode=3 prefill=2"]
    rows = [line.split() for line in out[3:]]
    assert sorted(rows) == sorted(
        [name, pool, "serving", "n1"] for pool in ("prefill", "decode") for name in kube.names(pool)
    )


def test_status_json_has_the_location_beside_the_documented_keys(kube: Kube, baton: Baton) -> None:
    code, out, _ = baton("status", "--json")
    report = json.loads("".join(out))
    assert code == 0
    assert {key: report[key] for key in ("ready", "url", "pools", "not_allowed")} == {
        "ready": True,
        "url": "",
        "pools": {
            "decode": {"role": "decode", "replicas": 3},
            "prefill": {"role": "prefill", "replicas": 2},
        },
        "not_allowed": [],
    }
    assert {key: report[key] for key in ("context", "server", "namespace", "cluster")} == {
        "context": "laptop", "server": kube.server.url, "namespace": HOME, "cluster": CLUSTER,
    }  # fmt: skip
    first = report["processes"][0]
    assert {"id", "role", "pid", "state", "address"} <= first.keys()
    assert first["id"] == report["workers"][0]["id"]


def test_status_is_not_ready_while_a_worker_is_missing(kube: Kube, baton: Baton) -> None:
    instant.set_ready(kube.api, kube.pods("decode")[0], False)
    assert json.loads("".join(baton("status", "--json")[1]))["ready"] is False


def announce(registry: MemoryRegistry, name: str, role: Role, pending: PendingSettings) -> None:
    member = Member(
        WorkerId(name), role, "10.0.0.1:1", Incarnation(1), WorkerState.READY,
        pending_settings=pending,
    )  # fmt: skip
    asyncio.run(registry.announce(member, 60.0))


def test_status_shows_what_each_program_has_not_applied(kube: Kube, baton: Baton) -> None:
    registry = kube.connect_registry()
    stale = PendingSettings(restart_needed=("max_sequences", "model"))
    rejected = PendingSettings(rejected="config file /etc/baton/baton.yaml is empty")
    announce(registry, "baton-conductor-1.uid", Role.CONDUCTOR, rejected)
    announce(registry, "baton-decode-1.uid", Role.DECODE, stale)
    announce(registry, "baton-decode-2.uid", Role.DECODE, stale)
    announce(registry, "baton-router-1.uid", Role.ROUTER, PendingSettings())
    code, out, err = baton("status")
    assert (code, err) == (0, [])
    assert " ".join(out[-3:]).endswith(
        "settings of baton-conductor-1: "
        "config file rejected: config file /etc/baton/baton.yaml is empty "
        "settings of baton-decode-1, baton-decode-2: restart needed: max_sequences, model"
    )
    assert json.loads("".join(baton("status", "--json")[1]))["pending_settings"] == {
        "baton-conductor-1": {"restart_needed": [], "rejected": rejected.rejected},
        "baton-decode-1": {"restart_needed": ["max_sequences", "model"], "rejected": ""},
        "baton-decode-2": {"restart_needed": ["max_sequences", "model"], "rejected": ""},
    }


def test_status_without_an_answer_of_redis_shows_the_pods(kube: Kube, baton: Baton) -> None:
    assert json.loads("".join(baton("status", "--json")[1]))["pending_settings"] is None
    kube.monkeypatch.setenv("BATON_REDIS_URL", "redis://127.0.0.1:1/0")
    code, out, err = baton("status")
    assert (code, len(out)) == (0, 3 + 5)
    [note] = err
    assert note.startswith("baton: not shown: which settings wait for a restart: ")


@pytest.mark.parametrize(
    "command", [["status"], ["status", "--json"], ["scale", "decode=2"], ["drain", "x"]]
)
def test_a_cluster_that_does_not_exist_is_an_error_that_names_those_that_do(
    kube: Kube, baton: Baton, command: list[str]
) -> None:
    code, _, err = baton(*command, "--name", "prod")
    assert code == 1
    assert err == [
        f"baton: context laptop ({kube.server.url}), namespace {HOME}: there is no cluster 'prod' "
        f"(--name); known clusters: {CLUSTER}"
    ]


@pytest.mark.parametrize("command", [["status"], ["scale", "decode=2"], ["drain", "x"]])
def test_a_namespace_that_does_not_exist_is_an_error(
    kube: Kube, baton: Baton, command: list[str]
) -> None:
    code, _, err = baton(*command, "--namespace", "nowhere")
    assert code == 1
    assert err == [
        f"baton: context laptop ({kube.server.url}), namespace nowhere: there is no such namespace"
    ]


def test_an_empty_namespace_is_an_error(kube: Kube, baton: Baton) -> None:
    code, _, err = baton("status", "--namespace", "default")
    assert code == 1
    assert err[0].endswith(
        f"namespace default: there is no cluster '{CLUSTER}' (--name); "
        "this user sees no cluster there"
    )


# -- permissions ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["off", "dry_run"])
def test_status_shows_a_conductor_without_the_right_to_resize_what_it_may_see(
    empty: Kube, baton: Baton, mode: str
) -> None:
    """With ``rbac.resize=false``, the conductors' Role may read the pools' sizes only if the
    autoscaler's mode is not "off". If the mode is "off", ``baton status``, run as a conductor,
    shows "?" for each size and names the missing right."""
    owner = "external" if mode == "dry_run" else "chart"
    empty.install(
        make_values(rbac__resize=False, conductor__autoscale__mode=mode, replicasManagedBy=owner)
    )
    empty.log_in_as_conductor()
    code, out, err = baton("status")
    assert code == 0
    assert out[0] == baton.location("conductor")
    assert len(out) == 3 + 5
    if mode == "dry_run":
        assert (out[1], err) == ("prefill=2 decode=3", [])
        return
    assert sorted(out[1].split()) == ["decode=?", "prefill=?"]
    assert err == [
        "baton: not shown, because RBAC does not allow it: get deployments/scale; the chart's "
        "value rbac.resize=true gives it to the conductors' Role"
    ]


def test_status_shows_a_user_who_may_only_list_pods_these(kube: Kube, baton: Baton) -> None:
    kube.log_in_with(PODS)
    code, out, err = baton("status")
    assert code == 0
    assert sorted(out[1].split()) == ["decode=?", "prefill=?"]
    assert len(out) == 3 + 5
    assert err == [
        "baton: not shown, because RBAC does not allow it: list deployments",
        "baton: not shown, because RBAC does not allow it: list statefulsets",
    ]
    report = json.loads("".join(baton("status", "--json")[1]))
    assert report["pools"]["decode"] == {"role": "decode", "replicas": None}
    assert report["not_allowed"] == ["list deployments", "list statefulsets"]


def test_status_shows_a_user_who_may_not_list_pods_the_sizes(kube: Kube, baton: Baton) -> None:
    kube.log_in_with(WORKLOADS)
    code, out, err = baton("status")
    assert (code, out[1]) == (0, "decode=3 prefill=2")
    assert err == ["baton: not shown, because RBAC does not allow it: list pods"]


def test_status_fails_for_a_user_who_may_see_nothing(kube: Kube, baton: Baton) -> None:
    kube.log_in_with()
    code, _, err = baton("status")
    assert code == 1
    assert err[0].startswith(f"baton: not allowed to list pods in namespace {HOME}")
