"""Tests how adapters are named on the command line and in settings, and shown by ``baton
status``."""

from dataclasses import replace
from pathlib import Path

import pytest

from baton.config import load_settings
from baton.core.adapter import MAX_ADAPTERS, WorkerAdapter
from baton.core.states import Role
from baton.errors import Invalid
from command_line.lifecycle_commands import parse_adapters
from command_line.status import adapter_lines
from tests.router_harness import member


def test_options_become_absolute_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_adapters(["sql=a/b", "acme/v1=/c", "own=~/d", "other=chat:e"]) == {
        "sql": f"{tmp_path}/a/b",
        "acme/v1": "/c",
        "own": "/home/me/d",
        "other": f"chat:{tmp_path}/e",
    }
    assert parse_adapters(None) is None


@pytest.mark.parametrize("pairs", [["sql"], ["sql="], ["=/a"], ["sql=/a", "sql=/b"]])
def test_malformed_options_are_refused(pairs: list[str]) -> None:
    with pytest.raises(Invalid, match="--adapter"):
        parse_adapters(pairs)


def test_settings_are_checked() -> None:
    settings = load_settings(adapters="sql=/a,acme/v1=/b")
    assert settings.adapters == {"sql": "/a", "acme/v1": "/b"}
    with pytest.raises(Invalid, match="an adapter's name must begin with"):
        load_settings(adapters="-sql=/a")
    with pytest.raises(Invalid, match="max_adapters"):
        load_settings(max_adapters=MAX_ADAPTERS + 1)


def test_each_model_gets_its_own_adapters() -> None:
    """Without a model, an adapter belongs to the first one. A colon that follows no model's name
    is part of the folder."""
    settings = load_settings(
        models={"one": "/one", "two": "/two"},
        adapters={"a": "/a", "b": "two:/b", "c": "one:/c", "d": "/odd:folder"},
    )
    assert settings.for_model("one").adapters == {"a": "/a", "c": "/c", "d": "/odd:folder"}
    assert settings.for_model("two").adapters == {"b": "/b"}
    with pytest.raises(Invalid, match="b belongs to model three, which is not one of the models"):
        load_settings(models={"one": "/one", "two": "/two"}, adapters={"b": "three:/b"})


def test_worker_loads_the_adapters_of_its_own_model() -> None:
    """Workers of several models may share their settings."""
    adapters = {"a": "/a", "b": "two:/b", "c": "one:/c"}
    settings = load_settings(model="/models/x", served_model_name="one", adapters=adapters)
    assert settings.own_adapters == {"a": "/a", "c": "/c"}


def test_status_shows_adapters_by_state() -> None:
    loaded = WorkerAdapter("sql", bytes(16))
    failed = replace(loaded, error="the file is missing")
    members = {
        name: member(name, Role.DECODE, adapters=(adapter,))
        for name, adapter in (("d1", loaded), ("d0", loaded), ("d2", failed))
    }
    assert adapter_lines(members) == [
        "adapter sql: loaded (d0, d1)",
        "adapter sql: not loaded: the file is missing (d2)",
    ]
