"""Tests the output and the exit codes of ``baton scale`` and ``baton drain`` with
``--on kubernetes``, for users with different permissions, with and without Redis."""

from typing import Any

import pytest

pytest.importorskip("kubernetes")
pytest.importorskip("helm_python")

from baton.core.ids import WorkerId
from baton.pools.kubernetes.pod import DELETION_COST
from tests.helm.chart import NAMESPACE as HOME
from tests.helm.chart import make_values
from tests.kube.commands.cluster import Baton, Kube
from tests.kube.commands.rules import PATCH_PODS, PODS, READ_SCALE, WORKLOADS
from tests.kube.kinds import (
    POD,
)


def test_scale_without_redis_waits_until_the_workers_have_drained_in_their_pods(
    kube: Kube, baton: Baton
) -> None:
    before = kube.names("decode")
    code, out, err = baton("scale", "decode=2")
    [gone] = set(before) - set(kube.names("decode"))
    assert (code, kube.replicas("decode")) == (0, 2)
    assert out == [
        baton.location(),
        f"decode 3 → 2: deleting {gone}, which drains first, 0 s",
        "decode 3 → 2: done",
    ]
    why = "workers can't be reached without a registry: the setting redis_url is not set"
    assert err == [
        f"baton: the newest workers go first, since the loads are unknown: {why}",
        f"baton: {gone} drains when Kubernetes deletes it, within 85 s, since it could not be told "
        f"before: {why}",
    ]


def test_scale_with_redis_shows_the_requests_that_are_left(kube: Kube, baton: Baton) -> None:
    workers = kube.connect_redis()
    idle, *busy = kube.names("decode")
    workers.requests = {idle: 2, **dict.fromkeys(busy, 9)}
    code, out, err = baton("scale", "decode=2")
    assert (code, err) == (0, [])
    assert out == [
        baton.location(),
        f"decode 3 → 2: draining {idle}: 2 requests left, 0 s",
        f"decode 3 → 2: draining {idle}: 1 request left, 0 s",
        f"decode 3 → 2: deleting {idle}, 1 s",
        "decode 3 → 2: done",
    ]
    assert (workers.drained, kube.names("decode")) == ([idle], busy)


def test_both_pools_are_shown(kube: Kube, baton: Baton) -> None:
    kube.connect_redis()
    code, out, _ = baton("scale", "decode=2", "prefill=3")
    assert code == 0
    assert len(out) == 3
    assert out[1].startswith("decode 3 → 2: deleting ")
    assert out[2] == "decode 3 → 2, prefill 2 → 3: done"


def test_drain_without_redis_waits_until_the_named_pod_is_gone(kube: Kube, baton: Baton) -> None:
    victim, *others = kube.names("decode")
    kube.num_waits_to_stop = 20
    code, out, err = baton("drain", victim)
    assert (code, kube.names("decode")) == (0, others)
    assert out == [
        baton.location(),
        f"deleting {victim}, which drains first, 0 s",
        f"{victim} is gone",
    ]
    assert len(err) == 1
    assert kube.clock.monotonic() >= 1_000_000.0 + 20


def test_a_pod_that_does_not_go_is_reported(kube: Kube, baton: Baton) -> None:
    kube.num_waits_to_stop = 10_000
    victim = kube.names("decode")[0]
    code, _, err = baton("drain", victim)
    assert code == 1
    assert err[-1] == (
        f"baton: {victim} still exists 146 s after its deletion, although its grace period is 85 "
        "s; look at its node, n1"
    )


def test_no_wait_returns_once_the_size_is_written(kube: Kube, baton: Baton) -> None:
    victim = kube.names("decode")[0]
    assert baton("drain", victim, "--no-wait")[:2] == (
        0, [baton.location(), f"{victim} is being deleted"],
    )  # fmt: skip
    assert victim in kube.names("decode")
    assert baton("scale", "prefill=1", "--no-wait")[1][1:] == ["prefill 2 → 1"]


def test_pods_that_others_delete_are_not_awaited(kube: Kube, baton: Baton) -> None:
    other = kube.names("decode")[0]
    kube.api.delete(POD, HOME, other)
    kube.settle()
    kube.num_waits_to_stop = 1
    kube._waits[other] = -100
    code, out, _ = baton("scale", "decode=2")
    assert (code, out[-1]) == (0, "decode 3 → 2: done")
    assert other in kube.names("decode")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["drain", "nobody"], "there is no worker 'nobody'; the workers are: "),
        (["scale", "big=2"], "there is no pool 'big'; the pools are: decode, prefill"),
        (["scale", "decode=0"], "decode=0: a pool must have 1 to 256 workers"),
        (["scale", "decode"], "scale takes POOL=N, as in decode=3, not decode"),
    ],
)
def test_wrong_names_and_sizes_are_wrong_usage(
    kube: Kube, baton: Baton, words: list[str], message: str
) -> None:
    code, _, err = baton(*words)
    assert code == 2
    assert err[0].startswith(f"baton: {message}")


def test_an_interrupt_before_the_size_is_written_revokes_the_drain(
    kube: Kube, baton: Baton
) -> None:
    workers = kube.connect_redis()
    victim = kube.names("decode")[0]
    workers.requests = {victim: 5}
    returned = []

    async def end_drain(worker_id: WorkerId) -> None:
        returned.append(worker_id.partition(".")[0])

    def interrupt() -> None:
        raise KeyboardInterrupt

    workers.end_drain = end_drain  # type: ignore[method-assign]
    kube.monkeypatch.setattr(kube, "step", interrupt)
    assert baton("drain", victim)[0] == 130
    assert (returned, kube.replicas("decode")) == ([victim], 3)
    assert DELETION_COST not in (
        kube.api.store.get(POD, HOME, victim)["metadata"].get("annotations") or {}
    )


# -- permissions ---------------------------------------------------------------------------


@pytest.mark.parametrize("resize", ["scale", "drain"])
@pytest.mark.parametrize(
    ("rules", "refused"),
    [
        ([PODS, WORKLOADS], "get deployments/scale"),
        ([PODS, WORKLOADS, READ_SCALE, PATCH_PODS], "update deployments/scale"),
    ],
)
def test_a_user_who_may_not_resize_changes_nothing(
    kube: Kube, baton: Baton, resize: str, rules: list[Any], refused: str
) -> None:
    workers = kube.connect_redis()
    kube.log_in_with(*rules)
    words = ["scale", "decode=2"] if resize == "scale" else ["drain", kube.names("decode")[0]]
    before = kube.api.store.version
    code, out, err = baton(*words)
    assert (code, out) == (1, [baton.location("user")])
    verb, resource = ("update", "deployments/scale") if resize == "scale" else refused.split()
    assert err[0].startswith(
        f"baton: not allowed to {verb} {resource} in namespace {HOME}: give this service account "
        f"or user a Role with the verb '{verb}' on '{resource}' ("
    )
    assert err[0].endswith(
        "; the chart's value rbac.resize=true gives it to the conductors' Role; nothing was changed"
    )
    assert (kube.api.store.version, workers.drained) == (before, [])


def test_a_conductor_without_the_right_to_resize_is_told_the_value(
    empty: Kube, baton: Baton
) -> None:
    empty.install(make_values(rbac__resize=False))
    empty.log_in_as_conductor()
    code, _, err = baton("scale", "decode=2")
    assert code == 1
    assert err[0].startswith("baton: not allowed to get deployments/scale")
    assert "rbac.resize=true" in err[0]
