"""``baton scale --on kubernetes`` and ``baton drain --on kubernetes``."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from baton.cli import kubernetes
from baton.config import Settings
from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Invalid

SETTINGS = Settings(cluster="test")


class RecordedPools:
    def __init__(self) -> None:
        self.asked: list[object] = []

    async def sizes(self) -> Mapping[Role, int]:
        return {Role.PREFILL: 2, Role.DECODE: 3}

    async def scale(self, wanted: Mapping[Role, int]) -> None:
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

    monkeypatch.setattr(kubernetes, "kubernetes_pools", opened)
    return made


def test_scale(pools: RecordedPools, capsys: pytest.CaptureFixture[str]) -> None:
    kubernetes.scale(SETTINGS, ["prefill=2", "decode=3"])
    assert pools.asked == [{Role.PREFILL: 2, Role.DECODE: 3}]
    assert capsys.readouterr().out == "prefill=2 decode=3\n"


def test_drain(pools: RecordedPools, capsys: pytest.CaptureFixture[str]) -> None:
    kubernetes.drain(SETTINGS, "baton-prefill-abc")
    assert pools.asked == ["baton-prefill-abc"]
    assert capsys.readouterr().out == "baton-prefill-abc drains, and then goes\n"


@pytest.mark.parametrize("text", ["prefill", "prefill=", "prefill=x", "router=1", "prefill=0"])
def test_wrong_sizes(pools: RecordedPools, text: str) -> None:
    with pytest.raises(Invalid, match="scale takes prefill=N and decode=N"):
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
