"""Tests that the table in :mod:`baton.config.setting_scopes` and the source agree on which programs
read each setting."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from baton.config import Reader, Settings, live_settings, restarting_settings
from baton.config.setting_scopes import SETTING_SCOPES
from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS, runs_engine

ROOT = Path(__file__).parents[4]
SERVED = frozenset(Reader) - {Reader.SUPERVISOR}

ROOMS: dict[str, frozenset[Reader]] = {
    "router": frozenset({Reader.ROUTER}),
    "conductor": frozenset({Reader.CONDUCTOR}),
    "prefill_worker": frozenset({Reader.WORKER}),
    "decode_worker": frozenset({Reader.WORKER}),
    "kvstore": frozenset({Reader.KVSTORE}),
    "orchestrator": frozenset({Reader.SUPERVISOR}),
    "baton/worker": frozenset({Reader.WORKER}),
    "baton/worker/mock": frozenset({Reader.MOCK}),
    "baton/worker/engine_settings.py": frozenset({Reader.WORKER}),
    "attached_worker": frozenset({Reader.WORKER}),
    "command_line/worker_program.py": frozenset({Reader.WORKER}),
    "baton/pools/autoscaler.py": frozenset({Reader.CONDUCTOR, Reader.SUPERVISOR}),
    "baton/pools/kubernetes": frozenset({Reader.CONDUCTOR}),
    "command_line/serve.py": SERVED,
    "command_line/up.py": frozenset({Reader.SUPERVISOR}),
}
"""The programs that run the code of each room; of several that match, the longest path counts."""

PROPERTIES = {
    "trust": "cluster_secret rpc_tls_certificate rpc_tls_key rpc_tls_ca",
    "has_server_workers": "attach engine",
    "model_name": "model served_model_name",
    "served_models": "models model served_model_name",
    "for_model": "models model served_model_name adapters",
    "own_adapters": "model served_model_name adapters",
    "required_redis_url": "redis_url",
    "accepted_hosts": "allowed_hosts advertise_address",
    "staging_bytes": "kv_staging_bytes kv_codec_wire",
}
"""The settings that each property of Settings reads."""

NOT_FOUND = {
    # Loading the settings moves it into redis_url.
    *(("redis_password", reader) for reader in Reader),
    # The sizes of pools are read by a computed name.
    *((role.value, Reader.SUPERVISOR) for role in WORKER_KINDS),
    *((f"mock_{role.value}", Reader.MOCK) for role in WORKER_KINDS if runs_engine(role)),
    # Loading the settings chooses the facilities.
    *(("portable", reader) for reader in Reader),
    # They only change how the settings are checked.
    ("allow_open_http", Reader.ROUTER),
    ("nixl_private_network", Reader.WORKER), ("nixl_private_network", Reader.KVSTORE),
}  # fmt: skip
"""Programs that read a setting in another way than ``settings.NAME``."""

NOT_READ = {
    # `baton serve` reads them for some roles only.
    *(("threads", reader) for reader in SERVED - {Reader.WORKER}),
    *(("endpoint_grace_seconds", reader) for reader in SERVED - {Reader.ROUTER}),
}
"""Programs that do not read a setting, although code that they share with others reads it."""


def readers_of(path: Path) -> frozenset[Reader]:
    name = path.relative_to(ROOT).as_posix()
    rooms = [room for room in ROOMS if name == room or name.startswith(f"{room}/")]
    return ROOMS[max(rooms, key=len)] if rooms else frozenset()


def found_in_source() -> set[tuple[str, Reader]]:
    found: dict[str, set[Reader]] = defaultdict(set)
    for folder in ROOMS:
        top = ROOT / folder
        for path in [top] if top.is_file() else top.rglob("*.py"):
            for name in re.findall(r"settings\.(\w+)", path.read_text()):
                for each in PROPERTIES.get(name, name).split():
                    found[each] |= readers_of(path)
    known = Settings.model_fields
    return {
        (name, reader) for name, readers in found.items() if name in known for reader in readers
    }


def test_the_table_has_every_setting_once() -> None:
    assert SETTING_SCOPES.keys() == Settings.model_fields.keys()
    for name, scope in SETTING_SCOPES.items():
        assert scope.live <= scope.readers, name


def test_the_table_names_the_programs_that_read_a_setting() -> None:
    listed = {(name, reader) for name, scope in SETTING_SCOPES.items() for reader in scope.readers}
    found = found_in_source()
    assert len(found) > 150
    assert sorted((found - NOT_READ) - listed) == []
    assert sorted(listed - found - NOT_FOUND) == []
    assert sorted(NOT_FOUND & found) == [] and sorted(NOT_READ & listed) == []


def test_each_role_of_a_member_is_a_program() -> None:
    programs = {role: Reader.of_role(role) for role in Role if role is not Role.REDIS}
    assert set(programs.values()) == SERVED
    assert programs[Role.PREFILL] is programs[Role.DECODE] is Reader.WORKER


def test_which_settings_are_live() -> None:
    assert {reader: sorted(live_settings(reader)) for reader in Reader} == {
        Reader.ROUTER: [
            "body_timeout_seconds", "first_token_timeout_seconds", "log_level", "max_body_bytes",
            "max_concurrent_requests", "max_inflight_body_bytes", "next_token_timeout_seconds",
            "placement_timeout_seconds", "request_timeout_seconds", "slo_itl_seconds",
            "slo_ttft_seconds", "strict_fields", "tenant_concurrent_uploads", "tenant_file_bytes",
            "tenant_files", "tenant_uploads_per_minute", "trace_endpoint", "trace_sample",
        ],
        Reader.CONDUCTOR: [
            "admission", "kubernetes_initial_replicas", "log_level", "max_sequences",
            "max_short_prompt_advantage", "slo_itl_seconds", "slo_ttft_seconds", "trace_endpoint",
        ],
        Reader.WORKER: ["log_level", "slo_itl_seconds", "trace_endpoint"],
        Reader.KVSTORE: ["log_level"],
        Reader.MOCK: ["log_level"],
        Reader.SUPERVISOR: ["log_level"],
    }  # fmt: skip


def test_the_documents_table_has_the_live_settings() -> None:
    text = (ROOT / "docs/commands.md").read_text().partition("| live settings |")[2]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    live = [name for name, scope in SETTING_SCOPES.items() if scope.live]
    assert sorted(listed) == sorted(live)


@pytest.mark.parametrize(
    ("name", "restarted"),
    [
        ("log_level", set()),
        ("slo_itl_seconds", set()),
        ("trace_sample", set()),
        ("max_sequences", {Reader.WORKER, Reader.SUPERVISOR}),
        ("store_bytes", {Reader.KVSTORE, Reader.SUPERVISOR}),
        ("access_log", {Reader.ROUTER, Reader.SUPERVISOR}),
        ("cluster_secret", set(Reader)),
    ],
)
def test_which_programs_must_be_restarted_after_a_change(name: str, restarted: set[Reader]) -> None:
    """The supervisor starts its processes with the settings that it read at its own start. So
    `baton up` must be restarted even for settings that only its processes read."""
    assert {reader for reader in Reader if restarting_settings(reader, [name])} == restarted
