"""Tests which pods a change of the values restarts: those whose pod template changes."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baton.config import Settings
from baton.config.setting_scopes import SETTING_SCOPES, Reader
from tests.helm.allowed_settings import CHART_SETTINGS
from tests.helm.chart import Object, render, with_value
from tools.chart_settings import KINDS, TABLE, table, worker_kinds

ALL = {"router", "conductor", "kvstore", "prefill", "decode"}
WORKERS = {"prefill", "decode"}


def templates(values: Object) -> dict[str, Object]:
    """Return the pod templates by role (or pool). Values are rendered only once."""
    return rendered_templates(json.dumps(values, sort_keys=True))


@cache
def rendered_templates(values: str) -> dict[str, Object]:
    release = render(with_value(json.loads(values), "kvstore.enabled", True))
    owners = [*release.all("Deployment"), *release.all("StatefulSet")]
    return {each["metadata"]["name"].removeprefix("demo-baton-"): each["spec"]["template"]
            for each in owners}  # fmt: skip


def restarted(path: str, value: Any, before: Object | None = None) -> set[str]:
    """Return the roles (or pools) whose pods are replaced when one value changes."""
    before = before or {}
    old, new = templates(before), templates(with_value(before, path, value))
    assert old.keys() == new.keys() == ALL | {"redis"} and old["redis"] == new["redis"]
    return {name for name in ALL if old[name] != new[name]}


@pytest.mark.parametrize(("file", "text"), [(TABLE, table()), (KINDS, worker_kinds())])
def test_the_tables_are_up_to_date(request: pytest.FixtureRequest, file: Path, text: str) -> None:
    if request.config.getoption("--rewrite"):
        file.write_text(text)
    assert file.read_text() == text, "pytest tests/helm --rewrite, and look at the diff"


@pytest.mark.parametrize(
    ("path", "value", "roles"),
    [
        ("logs.level", "debug", set()),
        ("logs.format", "console", ALL),
        ("settings.slo_itl_seconds", 0.025, set()),
        ("settings.slo_ttft_seconds", 1.0, set()),
        ("settings.admission", True, set()),
        ("settings.max_body_bytes", "1MiB", set()),
        ("settings.max_concurrent_requests", 10, set()),
        ("settings.request_timeout_seconds", 60, set()),
        ("settings.max_sequences", 8, WORKERS),
        ("settings.store_eviction", "lru", {"kvstore"}),
        ("settings.transports", ["grpc"], WORKERS | {"kvstore"}),
        ("settings.access_log", True, {"router"}),
        ("settings.placement_policy", "full_scan", {"conductor"}),
        ("settings.heartbeat_interval_seconds", 2, ALL),
        ("pools.decode.settings", {"slo_itl_seconds": 0.025}, {"decode"}),
        ("router.settings", {"max_body_bytes": "1MiB"}, {"router"}),
        ("pools.decode.replicas", 7, set()),
        ("endpointGraceSeconds", 20, ALL),  # part of each pod's grace period, too
    ],
)
def test_a_change_restarts_only_the_pods_that_need_it(
    path: str, value: Any, roles: set[str]
) -> None:
    assert restarted(path, value) == roles


def test_the_collector_and_the_sampling_of_traces_change_without_a_restart() -> None:
    assert restarted("traces.endpoint", "http://otel:4317") == set()
    traced = with_value({}, "traces.endpoint", "http://otel:4317")
    assert restarted("traces.sample", 0.5, traced) == set()
    assert restarted("traces.endpoint", "http://other:4317", traced) == set()


def test_a_setting_that_a_pool_overrides_does_not_restart_it() -> None:
    own = with_value({}, "pools.decode.settings", {"max_sequences": 4})
    assert restarted("settings.max_sequences", 8, own) == {"prefill"}


def test_each_setting_restarts_the_roles_that_read_it_and_where_it_is_not_live() -> None:
    """Add each setting that users may set to the values, and check which pods restart: those of the
    programs that read the setting, unless it is live there."""
    before = templates({})
    found, expected = {}, {}
    for name in sorted(SETTING_SCOPES.keys() - CHART_SETTINGS):
        if name.startswith("mock_"):
            continue
        after = templates({"settings": {name: default_value(name)}})
        found[name] = {role for role in ALL if before[role] != after[role]}
        scope = SETTING_SCOPES[name]
        readers = scope.readers - scope.live
        roles = {reader.value for reader in readers} & ALL
        expected[name] = roles | WORKERS if Reader.WORKER in readers else roles
    assert len(found) > 60
    assert found == expected


def default_value(name: str) -> Any:
    """Return a valid value for a setting: its default, or an arbitrary number if the default is
    None or differs from the chart's."""
    default = Settings.model_fields[name].get_default(call_default_factory=True)
    if name == "draft_model":
        return "/models/draft"
    if default is None:
        return 512
    if name in ("redis_wait_seconds", "worker_wait_seconds"):
        return 5
    return list(default) if isinstance(default, tuple) else default
