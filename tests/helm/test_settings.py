"""Every program of the chart understands what it is told: its variables and its file, read by
``baton.config`` itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.config import Settings, load_settings
from router.tenants.tenants_file import load_tenants_file
from tests.helm.chart import CHART, SCENARIOS, Object, Pod, Release, released, render, setting
from tests.helm.owned import OWNED, settings_schema

EVERY = pytest.mark.parametrize("scenario", SCENARIOS)

FIELDS = {
    "metadata.name": "pod-1", "metadata.uid": "7f1c", "status.podIP": "10.0.0.7",
    "spec.nodeName": "node-1",
}  # fmt: skip


def environment(pod: Pod) -> dict[str, str]:
    """As the kubelet makes it; what is secret is the name of its key."""
    told: dict[str, str] = {}
    for each in pod.main["env"]:
        value = each.get("value", "")
        if source := each.get("valueFrom"):
            key = source.get("secretKeyRef", {}).get("key")
            value = key or FIELDS[source["fieldRef"]["fieldPath"]]
        for name, known in told.items():
            value = value.replace(f"$({name})", known)
        told[each["name"]] = value
    return told


def settings_of(
    pod: Pod, release: Release, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    config = folder / "baton.yaml"
    name = f"{pod.spec['volumes'][0]['configMap']['name']}"
    config.write_text(release.one("ConfigMap", name)["data"]["baton.yaml"])
    told = environment(pod)
    assert told.pop("BATON_CONFIG") == "/etc/baton/baton.yaml"
    with monkeypatch.context() as patch:
        for variable, value in told.items():
            patch.setenv(variable, value)
        patch.setenv("BATON_CONFIG", str(config))
        return load_settings()


@EVERY
def test_every_program_starts_with_its_settings(
    scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = released(scenario)
    for pod in release.serving():
        settings = settings_of(pod, release, tmp_path, monkeypatch)
        assert settings.cluster == pod.labels["baton.dev/cluster"]
        assert settings.id == "pod-1.7f1c"
        assert settings.advertise_address == "10.0.0.7"
        ports = (settings.grpc_port, settings.line_port, settings.ops_port)
        assert ports == (7000, 7001, 9000)
        assert settings.endpoint_grace_seconds == 10
        assert settings.log_format == "json"
        is_router = pod.role == "router"
        assert settings.host == ("0.0.0.0" if is_router else "127.0.0.1")


def test_ray_supervisors_start_with_their_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = released("ray")
    (pod,) = [pod for pod in release.pods() if pod.role == "router"]
    settings = settings_of(pod, release, tmp_path, monkeypatch)
    assert (settings.on, settings.ray_address) == ("ray", "10.0.0.7:6379")
    assert (settings.prefill, settings.decode) == (2, 2)
    assert (settings.grpc_host, settings.grpc_port, settings.ops_port) == ("10.0.0.7", 0, None)


def loaded(pool: str, values: Object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    release = render(values)
    (pod,) = [pod for pod in release.serving() if pod.labels.get("baton.dev/pool") == pool]
    return settings_of(pod, release, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("max_running", 128, 128),
        ("pool_bytes", "64GiB", 64 * 2**30),
        ("pool_bytes", 68719476736, 2**36),
        ("transports", ["nixl", "grpc"], ("nixl", "grpc")),
        ("tenant_fairness", False, False),
        ("slo_token_gap_seconds", 0.025, 0.025),
        ("read_alone", "auto", "auto"),
    ],
)
def test_a_setting_arrives_as_it_was_given(
    name: str, value: Any, meant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To one pool by its environment, to all by the file, which the environment overrides."""
    one = {"pools": {"decode": {"settings": {name: value}}}}
    assert getattr(loaded("decode", one, tmp_path, monkeypatch), name) == meant
    every = loaded("decode", {"settings": {name: value}}, tmp_path, monkeypatch)
    assert getattr(every, name) == meant
    both = {"settings": {"max_running": 1}, "poolDefaults": {"settings": {"max_running": 2}}}
    assert loaded("prefill", both, tmp_path, monkeypatch).max_running == 2


@pytest.mark.parametrize(
    ("values", "device", "threads"),
    [
        ({}, "cpu", 1),
        (setting(pools__decode__gpu__count=1), "cuda", 1),
        (setting(pools__decode__image="cuda"), "cuda", 1),
        (setting(pools__decode__resources__requests__cpu="2500m"), "cpu", 3),
        (setting(pools__decode__resources__requests__cpu=4), "cpu", 4),
        (setting(pools__decode__resources__limits__cpu="2"), "cpu", 2),
        (setting(pools__decode__settings__threads=0), "cpu", 0),
        (setting(settings__threads=7), "cpu", 7),
        (setting(poolDefaults__resources__requests__cpu=None), "cpu", 0),
        (setting(pools__decode__gpu__count=2, pools__decode__settings__device="auto"), "auto", 1),
    ],
)
def test_device_and_threads_follow_from_what_is_asked_for(
    values: Object, device: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = loaded("decode", values, tmp_path, monkeypatch)
    assert (settings.device, settings.threads) == (device, threads)


def test_where_the_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = released("everything")
    models = {
        pod.name: settings_of(pod, release, tmp_path, monkeypatch).model
        for pod in release.serving()
        if pod.role in ("prefill", "decode", "router")
    }
    hub = "Qwen/Qwen3-8B"
    assert models == {
        "baton-router": hub, "baton-prefill": hub, "baton-decode": hub, "baton-rdma": hub,
        "baton-baked": "/models/qwen", "baton-local": "/models/qwen3-8b",
    }  # fmt: skip


def test_the_autoscaler_is_the_conductors_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = released("autoscaled")
    for pod in release.serving():
        settings = settings_of(pod, release, tmp_path, monkeypatch)
        assert settings.autoscale == ("on" if pod.role == "conductor" else "off")
        if pod.role == "conductor":
            assert settings.autoscale_pools == "kubernetes"
            assert settings.kubernetes_namespace == "models"
            assert settings.kubernetes_lease == "demo-baton-conductor"
            assert settings.kubernetes_pools == {
                "prefill": "prefill/demo-baton-prefill", "decode": "decode/demo-baton-decode",
            }  # fmt: skip
            assert settings.autoscale_prefill_pool == "prefill"
            assert (settings.max_workers, settings.min_decode, settings.max_decode) == (12, 2, 8)


def test_a_changed_setting_restarts_pods_and_a_changed_size_does_not() -> None:
    def sums(values: Object) -> set[str]:
        deployments = render(values).all("Deployment")
        annotations = [each["spec"]["template"]["metadata"].get("annotations", {})
                       for each in deployments]  # fmt: skip
        return {each["checksum/config"] for each in annotations if each}

    assert sums({}) == sums(setting(pools__decode__replicas=7))
    assert sums({}).isdisjoint(sums(setting(settings__max_running=7)))


def test_the_schema_knows_the_settings(request: pytest.FixtureRequest) -> None:
    """``pytest tests/helm --rewrite`` writes them anew."""
    path = CHART / "values.schema.json"
    schema = json.loads(path.read_text())
    if request.config.getoption("--rewrite"):
        schema["definitions"]["settings"] = settings_schema()
        path.write_text(json.dumps(schema, indent=2) + "\n")
    known = schema["definitions"]["settings"]
    assert known == settings_schema(), "pytest tests/helm --rewrite, and look at the diff"


def test_the_charts_own_settings_are_settings() -> None:
    assert set(Settings.model_fields) >= OWNED


def test_tenants_are_a_tenants_file(tmp_path: Path) -> None:
    secret = released("everything").one("Secret", "baton-tenants")
    path = tmp_path / "tenants.yaml"
    path.write_text(secret["stringData"]["tenants.yaml"])
    (tenant,) = load_tenants_file(path).tenants.values()
    assert (tenant.id, tenant.limits.requests_per_minute) == ("acme", 600)
