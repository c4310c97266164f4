"""``baton scale --on kubernetes`` and ``baton drain --on kubernetes``."""

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
        self.asked: list[object] = []

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
        self.asked.append(dict(wanted))

    async def remove(self, worker_id: WorkerId) -> None:
        self.asked.append(worker_id)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> RecordedPools:
    made = RecordedPools()

    @asynccontextmanager
    async def opened(settings: Settings, *others: object) -> AsyncIterator[RecordedPools]:
        assert settings is SETTINGS
        yield made

    monkeypatch.setattr(kubernetes, "open_kubernetes_pools", opened)
    return made


def test_scale(pools: RecordedPools, capsys: pytest.CaptureFixture[str]) -> None:
    kubernetes.scale(SETTINGS, ["prefill=2", "decode-big=3"])
    assert pools.asked == [{"prefill": 2, "decode-big": 3}]
    assert capsys.readouterr().out == "prefill=2 decode-big=3\n"


def test_status(pools: RecordedPools, capsys: pytest.CaptureFixture[str]) -> None:
    kubernetes.status(SETTINGS, as_json=False)
    sizes, _heading, pod = capsys.readouterr().out.splitlines()
    assert sizes == "prefill=2 decode-big=3"
    assert pod.split(maxsplit=3) == ["b-decode-big-x", "decode", "pending", "0/3 nodes have a GPU"]


def test_status_for_scripts(pools: RecordedPools, capsys: pytest.CaptureFixture[str]) -> None:
    kubernetes.status(SETTINGS, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["pools"]["decode-big"] == {"role": "decode", "replicas": 3}
    assert told["workers"][0]["id"] == "b-decode-big-x"


def test_drain(pools: RecordedPools, capsys: pytest.CaptureFixture[str]) -> None:
    kubernetes.drain(SETTINGS, "baton-prefill-abc")
    assert pools.asked == ["baton-prefill-abc"]
    assert capsys.readouterr().out == "baton-prefill-abc drains, and then goes\n"


@pytest.mark.parametrize("text", ["prefill", "prefill=", "prefill=x", "prefill=-1", "=1"])
def test_wrong_sizes(pools: RecordedPools, text: str) -> None:
    with pytest.raises(Invalid, match="scale takes POOL=N, as in decode=3"):
        kubernetes.scale(SETTINGS, [text])
    assert pools.asked == []


def test_neither_in_a_pod_nor_with_a_kubeconfig(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", f"{tmp_path}/none"
    )
    with pytest.raises(Invalid, match="neither in a pod nor with a usable kubeconfig"):
        kubernetes.scale(SETTINGS, ["prefill=1"])
