"""Tests which worker backend the settings select, and the launch spec of a worker on another
machine."""

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from baton.config import DEMO_MODEL, load_settings
from baton.core.states import Role
from baton.errors import Invalid
from orchestrator.backends import check_backend
from orchestrator.cluster_state import ClusterFolder
from orchestrator.launch_specs import LaunchSpecs, RemoteWorkerSpec


def order(tmp_path: Path, **settings: object) -> RemoteWorkerSpec:
    named = load_settings(redis_url="redis://127.0.0.1:1/0", port=0, **settings)
    return LaunchSpecs(named, ClusterFolder(tmp_path, "test")).remote_worker(Role.DECODE)


def test_missing_ray_is_reported_with_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Invalid, match=r"Ray is not installed: pip install 'baton\[ray\]'"):
        check_backend(load_settings(on="ray"))
    check_backend(load_settings(on="local"))


def test_mock_workers_cannot_be_autoscaled() -> None:
    with pytest.raises(Invalid, match="mock is true"):
        check_backend(load_settings(mock=True, autoscale="on"))
    check_backend(load_settings(mock=True))


def test_servers_are_either_attached_or_started() -> None:
    servers = {"attach": ("mixed=http://127.0.0.1:1",)}
    check_backend(load_settings(**servers))
    with pytest.raises(Invalid, match="and engine vllm would start others: set one of them"):
        check_backend(load_settings(**servers, engine="vllm"))


@pytest.mark.parametrize("servers", [{"attach": ("mixed=http://127.0.0.1:1",)}, {"engine": "vllm"}])
def test_adapters_of_servers_are_left_to_them(servers: dict[str, object]) -> None:
    with pytest.raises(Invalid, match="adapters names sql, which vLLM has to load itself: start"):
        check_backend(load_settings(**servers, adapters={"sql": "/adapters/sql"}))


def test_all_mock_workers_share_one_process(tmp_path: Path) -> None:
    named = load_settings(redis_url="redis://127.0.0.1:1/0", port=0, mock=True, prefill=3, decode=5)
    spec = LaunchSpecs(named, ClusterFolder(tmp_path, "test")).mock()
    assert (spec.id, spec.role, spec.command[-2:]) == ("mock", "mock", ("serve", "mock"))
    found = spec.environment
    assert (found["BATON_MOCK_PREFILL"], found["BATON_MOCK_DECODE"]) == ("3", "5")


def test_remote_spec_is_plain_json_without_paths_of_this_machine(
    tmp_path: Path,
) -> None:
    found = order(tmp_path, threads=3, prefill=2)
    assert (found.id, found.role, found.threads) == ("decode-0", "decode", 3)
    assert found.command == ["-P", "-m", "baton", "serve", "decode"]
    assert found.log == "clusters/test/logs/decode-0.log"
    # Every installation has its own copy of the demo model.
    assert "model" not in found.settings
    assert str(DEMO_MODEL) not in json.dumps(asdict(found))


def test_remote_spec_names_a_configured_model(tmp_path: Path) -> None:
    assert order(tmp_path, model="/shared/qwen").settings["model"] == "/shared/qwen"


def test_local_and_remote_workers_share_one_numbering(tmp_path: Path) -> None:
    named = load_settings(redis_url="redis://127.0.0.1:1/0", port=0)
    recipe = LaunchSpecs(named, ClusterFolder(tmp_path, "test"))
    assert recipe.worker(Role.PREFILL).id == "prefill-0"
    assert recipe.remote_worker(Role.PREFILL).id == "prefill-1"
    assert recipe.remote_worker(Role.DECODE).id == "decode-0"


@pytest.mark.parametrize("address", ["here", "host:", "ray://a:1", "a b:1", "host:123456"])
def test_invalid_ray_addresses_are_rejected(address: str) -> None:
    with pytest.raises(Invalid, match="must be auto, or HOST:PORT of a running Ray"):
        load_settings(on="ray", ray_address=address)


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "head.lan:6379", "[::1]:6379"])
def test_valid_ray_addresses_are_accepted(address: str) -> None:
    assert load_settings(on="ray", ray_address=address).ray_address == address
