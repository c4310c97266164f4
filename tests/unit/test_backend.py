"""Which backend the settings name, and what a worker on another machine is told."""

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
    return LaunchSpecs(named, ClusterFolder(tmp_path, "test")).order(Role.DECODE)


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Invalid, match=r"Ray is not installed: pip install 'baton\[ray\]'"):
        check_backend(load_settings(on="ray"))
    check_backend(load_settings(on="local"))


def test_mock_workers_are_processes_of_this_machine_and_stay_as_many() -> None:
    with pytest.raises(Invalid, match="mock is true"):
        check_backend(load_settings(mock=True, autoscale="on"))
    check_backend(load_settings(mock=True))


def test_one_process_for_all_mock_workers(tmp_path: Path) -> None:
    named = load_settings(redis_url="redis://127.0.0.1:1/0", port=0, mock=True, prefill=3, decode=5)
    spec = LaunchSpecs(named, ClusterFolder(tmp_path, "test")).mock()
    assert (spec.id, spec.role, spec.command[-2:]) == ("mock", "mock", ("serve", "mock"))
    told = spec.environment
    assert (told["BATON_MOCK_PREFILL"], told["BATON_MOCK_DECODE"]) == ("3", "5")


def test_an_order_is_plain_and_names_nothing_of_this_machine_that_another_lacks(
    tmp_path: Path,
) -> None:
    told = order(tmp_path, threads=3, prefill=2)
    assert (told.id, told.role, told.threads) == ("decode-0", "decode", 3)
    assert told.command == ["-m", "baton", "serve", "decode"]
    assert told.log == "clusters/test/logs/decode-0.log"
    # Every installation has its own copy of the demo model.
    assert "model" not in told.settings
    assert str(DEMO_MODEL) not in json.dumps(asdict(told))


def test_a_model_of_ones_own_is_named(tmp_path: Path) -> None:
    assert order(tmp_path, model="/shared/qwen").settings["model"] == "/shared/qwen"


def test_local_workers_and_those_elsewhere_share_their_numbers(tmp_path: Path) -> None:
    named = load_settings(redis_url="redis://127.0.0.1:1/0", port=0)
    recipe = LaunchSpecs(named, ClusterFolder(tmp_path, "test"))
    assert recipe.worker(Role.PREFILL).id == "prefill-0"
    assert recipe.order(Role.PREFILL).id == "prefill-1"
    assert recipe.order(Role.DECODE).id == "decode-0"


@pytest.mark.parametrize("address", ["here", "host:", "ray://a:1", "a b:1", "host:123456"])
def test_wrong_addresses_of_ray(address: str) -> None:
    with pytest.raises(Invalid, match="must be auto, or HOST:PORT of a running Ray"):
        load_settings(on="ray", ray_address=address)


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "head.lan:6379", "[::1]:6379"])
def test_addresses_of_ray(address: str) -> None:
    assert load_settings(on="ray", ray_address=address).ray_address == address
