"""``baton scale --on kubernetes``, ``baton drain --on kubernetes`` and ``baton status``."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from baton.config import Settings
from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Invalid
from baton.pools.base import PoolWorker
from command_line import kubernetes

pytest.importorskip("kubernetes")

from baton.pools.kubernetes.api import KubernetesWorkload

SETTINGS = Settings(cluster="test")


class RecordedPools:
    def __init__(self) -> None:
        self.calls: list[object] = []

    async def pools(self) -> Mapping[str, KubernetesWorkload]:
        return {
            "prefill": KubernetesWorkload("Deployment", "b-prefill", Role.PREFILL, 2, "prefill"),
            "decode-big": KubernetesWorkload(
                "Deployment", "b-decode-big", Role.DECODE, 3, "decode-big"
            ),
        }

    async def workers(self) -> list[PoolWorker]:
        why = "0/3 nodes have a GPU"
        return [PoolWorker(WorkerId("b-decode-big-x"), Role.DECODE, "pending", "", why)]

    async def resize(self, wanted: Mapping[str, int]) -> None:
        self.calls.append(dict(wanted))

    async def remove(self, worker_id: WorkerId) -> None:
        self.calls.append(worker_id)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> RecordedPools:
    recorded = RecordedPools()

    @asynccontextmanager
    async def opened(settings: Settings, *others: object) -> AsyncIterator[RecordedPools]:
        assert settings is SETTINGS
        yield recorded

    monkeypatch.setattr(kubernetes, "open_kubernetes_pools", opened)
    return recorded


def test_scale_resizes_the_named_pools(
    pools: RecordedPools, capsys: pytest.CaptureFixture[str]
) -> None:
    kubernetes.scale(SETTINGS, ["prefill=2", "decode-big=3"])
    assert pools.calls == [{"prefill": 2, "decode-big": 3}]
    assert capsys.readouterr().out == "prefill=2 decode-big=3\n"


def test_status_lists_pools_and_pending_pods(
    pools: RecordedPools, capsys: pytest.CaptureFixture[str]
) -> None:
    kubernetes.status(SETTINGS, as_json=False)
    sizes, _heading, pod = capsys.readouterr().out.splitlines()
    assert sizes == "prefill=2 decode-big=3"
    assert pod.split(maxsplit=3) == ["b-decode-big-x", "decode", "pending", "0/3 nodes have a GPU"]


def test_status_json_lists_pools_and_workers(
    pools: RecordedPools, capsys: pytest.CaptureFixture[str]
) -> None:
    kubernetes.status(SETTINGS, as_json=True)
    status = json.loads(capsys.readouterr().out)
    assert status["pools"]["decode-big"] == {"role": "decode", "replicas": 3}
    assert status["workers"][0]["id"] == "b-decode-big-x"


def test_drain_removes_the_named_worker(
    pools: RecordedPools, capsys: pytest.CaptureFixture[str]
) -> None:
    kubernetes.drain(SETTINGS, "baton-prefill-abc")
    assert pools.calls == ["baton-prefill-abc"]
    assert capsys.readouterr().out == "baton-prefill-abc is draining, and will then be removed\n"


@pytest.mark.parametrize("text", ["prefill", "prefill=", "prefill=x", "prefill=-1", "=1"])
def test_invalid_sizes_are_rejected(pools: RecordedPools, text: str) -> None:
    with pytest.raises(Invalid, match="scale takes POOL=N, as in decode=3"):
        kubernetes.scale(SETTINGS, [text])
    assert pools.calls == []


def test_missing_kubernetes_access_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", f"{tmp_path}/none"
    )
    with pytest.raises(Invalid, match="this is not a pod, and there is no usable kubeconfig"):
        kubernetes.scale(SETTINGS, ["prefill=1"])
