"""Tests the settings that ``baton.config`` reads in each of the chart's containers, from the
environment and the config file."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.config import Settings, config_version, load_settings
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import Invalid
from router.tenants.tenants_file import load_tenants_file
from tests.helm.allowed_settings import CHART_SETTINGS, settings_schema
from tests.helm.chart import (
    CHART,
    COMMIT,
    SCENARIOS,
    Object,
    Pod,
    Release,
    make_values,
    release_of,
    render,
)

Capture = pytest.CaptureFixture[str]
EVERY = pytest.mark.parametrize("scenario", SCENARIOS)

FIELDS = {
    "metadata.name": "pod-1", "metadata.uid": "7f1c", "status.podIP": "10.0.0.7",
    "spec.nodeName": "node-1",
}  # fmt: skip


def environment(pod: Pod) -> dict[str, str]:
    """Return the environment that the kubelet would set, with a secret's key in place of its
    value."""
    variables: dict[str, str] = {}
    for each in pod.main["env"]:
        value = each.get("value", "")
        if source := each.get("valueFrom"):
            key = source.get("secretKeyRef", {}).get("key")
            value = key or FIELDS[source["fieldRef"]["fieldPath"]]
        for name, known in variables.items():
            value = value.replace(f"$({name})", known)
        variables[each["name"]] = value
    return variables


def settings_of(
    pod: Pod, release: Release, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    config = folder / "baton.yaml"
    name = f"{pod.spec['volumes'][0]['configMap']['name']}"
    config.write_text(release.one("ConfigMap", name)["data"]["baton.yaml"])
    variables = environment(pod)
    assert variables.pop("BATON_CONFIG") == "/etc/baton/baton.yaml"
    assert variables.pop("BATON_SECRETS_DIRECTORY") == "/etc/baton-secrets"
    secrets = folder / f"secrets-{pod.name}"
    secrets.mkdir(exist_ok=True)
    for setting, (_, key) in pod.secret_files.items():
        (secrets / setting).write_text(key)
    with monkeypatch.context() as patch:
        for variable, value in variables.items():
            patch.setenv(variable, value)
        patch.setenv("BATON_CONFIG", str(config))
        patch.setenv("BATON_SECRETS_DIRECTORY", str(secrets))
        return load_settings()


@EVERY
def test_every_program_starts_with_its_settings(
    scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = release_of(scenario)
    for pod in release.serving():
        settings = settings_of(pod, release, tmp_path, monkeypatch)
        assert settings.cluster == pod.labels["baton.dev/cluster"]
        assert settings.id == "pod-1.7f1c"
        assert settings.advertise_address == "10.0.0.7"
        ports = (settings.grpc_port, settings.framed_port, settings.ops_port)
        assert ports == (7000, 7001, 9000)
        assert settings.endpoint_grace_seconds == 10
        assert settings.log_format == "json"
        is_router = pod.role == "router"
        assert settings.host == ("0.0.0.0" if is_router else "127.0.0.1")


def test_ray_supervisors_start_with_their_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = release_of("ray")
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
    ("name", "value", "expected"),
    [
        ("max_sequences", 128, 128),
        ("pool_bytes", "64GiB", 64 * 2**30),
        ("pool_bytes", 68719476736, 2**36),
        ("transports", ["nixl", "grpc"], ("nixl", "grpc")),
        ("tenant_fairness", False, False),
        ("slo_itl_seconds", 0.025, 0.025),
        ("local_prefill", "auto", "auto"),
    ],
)
def test_a_setting_reaches_its_program(
    name: str, value: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool's setting is passed in the environment of its pods, and a common setting in the config
    file, which the environment overrides."""
    one = {"pools": {"decode": {"settings": {name: value}}}}
    assert getattr(loaded("decode", one, tmp_path, monkeypatch), name) == expected
    every = loaded("decode", {"settings": {name: value}}, tmp_path, monkeypatch)
    assert getattr(every, name) == expected
    both = {"settings": {"max_sequences": 1}, "poolDefaults": {"settings": {"max_sequences": 2}}}
    assert loaded("prefill", both, tmp_path, monkeypatch).max_sequences == 2


@pytest.mark.parametrize(
    ("values", "device", "threads"),
    [
        ({}, "cpu", 1),
        (make_values(pools__decode__gpu__count=1), "cuda", 1),
        (make_values(pools__decode__image="cuda"), "cuda", 1),
        (make_values(pools__decode__resources__requests__cpu="2500m"), "cpu", 3),
        (make_values(pools__decode__resources__requests__cpu=4), "cpu", 4),
        (make_values(pools__decode__resources__limits__cpu="2"), "cpu", 2),
        (make_values(pools__decode__settings__threads=0), "cpu", 0),
        (make_values(settings__threads=7), "cpu", 7),
        (make_values(poolDefaults__resources__requests__cpu=None), "cpu", 0),
        (
            make_values(pools__decode__gpu__count=2, pools__decode__settings__device="auto"),
            "auto",
            1,
        ),
    ],
)
def test_device_and_threads_follow_from_the_resources(
    values: Object, device: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = loaded("decode", values, tmp_path, monkeypatch)
    assert (settings.device, settings.threads) == (device, threads)


def test_a_setting_of_zero_overrides_the_charts_default() -> None:
    values = make_values(settings__redis_wait_seconds=0, settings__slo_ttft_seconds=2)
    file = render(values).one("ConfigMap", "demo-baton-config")["data"]["baton.yaml"]
    settings = yaml.safe_load(file)
    waits = [settings[f"{name}_wait_seconds"] for name in ("redis", "worker")]
    assert waits == [0, 10] and settings["slo_ttft_seconds"] == 2


def test_pods_of_the_version_before_start_with_a_setting_that_they_do_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that restarts during an upgrade reads the new chart's settings."""
    release = render({})
    (pod,) = [each for each in release.pods() if each.name.endswith("-decode")]
    data = release.one("ConfigMap", "demo-baton-config")["data"]
    data["baton.yaml"] += "level_of_detail: 3\n"
    with pytest.raises(Invalid, match="there is no setting 'level_of_detail'"):
        settings_of(pod, release, tmp_path, monkeypatch)
    monkeypatch.setattr(config_version, "program_version", lambda: "0.0.9")
    assert settings_of(pod, release, tmp_path, monkeypatch).cluster == "demo-baton"


def test_each_program_gets_the_location_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = release_of("everything")
    models = {
        pod.name: settings_of(pod, release, tmp_path, monkeypatch).model
        for pod in release.serving()
        if pod.role in ("prefill", "decode", "router")
    }
    hub = f"Qwen/Qwen3-8B@{COMMIT}"
    assert models == {
        "baton-router": hub, "baton-prefill": hub, "baton-decode": hub, "baton-rdma": hub,
        "baton-baked": "/models/qwen", "baton-local": "/models/qwen3-8b",
    }  # fmt: skip


def test_only_conductors_autoscale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = release_of("autoscaled")
    for pod in release.serving():
        settings = settings_of(pod, release, tmp_path, monkeypatch)
        assert settings.autoscale == ("on" if pod.role == "conductor" else "off")
        if pod.role == "conductor":
            assert settings.autoscale_pools == "kubernetes"
            assert settings.kubernetes_namespace == "models"
            assert settings.kubernetes_lease == "demo-baton-leader"
            assert settings.kubernetes_pools == {
                "prefill": "prefill/demo-baton-prefill", "decode": "decode/demo-baton-decode",
            }  # fmt: skip
            assert settings.kubernetes_initial_replicas == {
                "demo-baton-router": 2, "demo-baton-prefill": 1, "demo-baton-decode": 1,
            }  # fmt: skip
            assert settings.autoscale_prefill_pool == "prefill"
            assert (settings.max_workers, settings.min_decode, settings.max_decode) == (12, 2, 8)


def test_the_values_schema_contains_all_settings(request: pytest.FixtureRequest) -> None:
    """And all kinds of workers. ``pytest tests/helm --rewrite`` updates the schema."""
    path = CHART / "values.schema.json"
    schema, roles = json.loads(path.read_text()), {"enum": ["", *WORKER_KINDS]}
    if request.config.getoption("--rewrite"):
        schema["definitions"]["settings"] = settings_schema()
        schema["definitions"]["pool"]["properties"]["role"] = roles
        path.write_text(json_text(schema))
    known = schema["definitions"]["settings"]
    assert known == settings_schema(), "pytest tests/helm --rewrite, and look at the diff"
    assert schema["definitions"]["pool"]["properties"]["role"] == roles


def json_text(value: Any) -> str:
    """Return ``value`` as JSON, with objects and lists that contain no others on one line."""
    innermost = re.compile(r"([{\[])\s+([^][{}]*?)\s+([}\]])")
    text = json.dumps(value, indent=1, ensure_ascii=False)
    return innermost.sub(lambda each: each[1] + " ".join(each[2].split()) + each[3], text) + "\n"


def test_settings_that_the_chart_sets_exist() -> None:
    assert set(Settings.model_fields) >= CHART_SETTINGS


def test_tenants_are_rendered_as_a_tenants_file(tmp_path: Path) -> None:
    secret = release_of("everything").one("Secret", "baton-tenants")
    path = tmp_path / "tenants.yaml"
    path.write_text(secret["stringData"]["tenants.yaml"])
    (tenant,) = load_tenants_file(path).tenants.values()
    assert (tenant.id, tenant.limits.requests_per_minute) == ("acme", 600)
