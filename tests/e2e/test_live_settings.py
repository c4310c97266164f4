"""Tests that live settings take effect without a restart when the config file of a running cluster
changes."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.core.pending_settings import PendingSettings
from command_line.status import fetch_members
from orchestrator.cluster_state import ClusterFolder
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import pause

pytestmark = pytest.mark.timeout(300)
GREEDY = {"temperature": 0, "ignore_eos": True}
CHANGE_SECONDS = 30.0
"""The timeout for a change to take effect. A process looks at the config file twice, a few
seconds apart, before it applies a change; the rest is room for a busy machine."""


def wait_for_status(
    cluster: LocalCluster, condition: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    give_up_at = time.monotonic() + CHANGE_SECONDS
    while not condition(status := cluster.status()):
        assert time.monotonic() < give_up_at, status
        pause(0.1)
    return status


def settings_of(status: dict[str, Any]) -> dict[str, Any]:
    """Return the reported settings by process id; the key "" has those of the whole cluster."""
    return {each["id"]: each["settings"] for each in status["processes"]} | {"": status["settings"]}


def wait_for_members(
    cluster: LocalCluster, condition: Callable[[PendingSettings], bool]
) -> dict[str, PendingSettings]:
    """Wait until the pending settings of all members in the registry meet ``condition``; return
    them. Members update their entries with their next heartbeat."""
    state = ClusterFolder(cluster.home, "default").read_running()
    give_up_at = time.monotonic() + CHANGE_SECONDS
    while True:
        members = asyncio.run(fetch_members(state)).values()
        pending: dict[str, PendingSettings] = {m.id: m.pending_settings for m in members}
        if all(condition(each) for each in pending.values()):
            return pending
        assert time.monotonic() < give_up_at, pending
        pause(0.1)


def events(cluster: LocalCluster, process: str) -> list[dict[str, Any]]:
    """Return the process's log lines about its settings."""
    text = (cluster.home / "clusters" / "default" / "logs" / f"{process}.log").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [each for each in lines if each["event"] in ("settings_changed", "config_file_rejected")]


def test_settings_change_without_a_restart(tmp_path: Path) -> None:
    config = tmp_path / "baton.yaml"
    config.write_text("log_format: json\n")
    with local_cluster(settings={"config": config}) as cluster:
        del cluster.environment["BATON_CONFIG"]  # for `baton status` while the file is invalid
        before = cluster.status()
        pids = {each["id"]: each["pid"] for each in before["processes"]}
        assert set(pids) == {"redis", "kvstore", "conductor", "prefill-0", "decode-0", "router"}
        assert set(map(str, settings_of(before).values())) == {"{}"}

        config.write_text(
            "log_format: json\nlog_level: debug\nslo_itl_seconds: 0.5\nmax_body_bytes: 200\n"
            "max_sequences: 8\n"
        )
        both = {"log_level": "debug", "slo_itl_seconds": "0.5"}
        expected = {
            "redis": {},
            "kvstore": {"changed": {"log_level": "debug"}},
            "conductor": {"changed": {"max_sequences": "8"} | both},
            "prefill-0": {"changed": both},
            "decode-0": {"changed": both},
            "router": {"changed": {"max_body_bytes": "200"} | both},
            "": {"changed": {"log_level": "debug"}, "restart_needed": ["max_sequences"]},
        }
        after = wait_for_status(cluster, lambda status: settings_of(status) == expected)
        assert {each["id"]: each["pid"] for each in after["processes"]} == pids
        assert all(each["restarts"] == 0 for each in after["processes"])
        assert (
            "settings of prefill-0, decode-0: log_level is now debug; slo_itl_seconds is now 0.5"
            in (cluster.baton("status").stdout.replace("\n", " "))
        )
        (line,) = events(cluster, "decode-0")
        assert (line["old"], line["new"]) == (
            {"log_level": "info", "slo_itl_seconds": 0.05},
            {"log_level": "debug", "slo_itl_seconds": 0.5},
        )

        assert len(cluster.complete([65, 66, 67], 3, **GREEDY)) == 3
        assert "request_ended" in cluster.baton("logs", "decode-0").stdout  # a debug line
        with pytest.raises(RuntimeError, match="413: "):
            cluster.complete([65] * 200, 3, **GREEDY)

        config.write_text("log_format: json\nlog_level: loud\n")
        rejected = wait_for_status(
            cluster, lambda status: all("rejected" in each for each in settings_of(status).values()
                                        if each)
        )  # fmt: skip
        assert "log_level is 'loud'" in settings_of(rejected)["router"]["rejected"]
        assert settings_of(rejected)["router"]["changed"] == expected["router"]["changed"]
        assert "config file rejected: log_level is 'loud'" in cluster.baton("status").stdout
        members = wait_for_members(cluster, lambda each: each.rejected != "")
        assert members.keys() == settings_of(before).keys() - {"redis", ""}
        assert "log_level is 'loud'" in members["kvstore"].rejected

        config.write_text("log_format: json\n")
        again = wait_for_status(cluster, lambda status: not any(settings_of(status).values()))
        assert {each["id"]: each["pid"] for each in again["processes"]} == pids
        assert len(cluster.complete([65] * 200, 3, **GREEDY)) == 3
