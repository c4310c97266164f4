"""Tests that a running program follows its config file: live settings are applied, others are
reported, and an invalid file changes nothing."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.clock import ManualClock
from baton.config import Reader, Settings, load_settings, reload_settings
from baton.config.setting_warning import OnWarning
from baton.serve import settings_watcher
from baton.serve.settings_watcher import CONFIG_POLL_SECONDS, SettingsStatus, SettingsWatcher


class WatchedProgram:
    """A program with a watcher of the config file in ``folder``. ``applied`` lists the settings
    that the watcher told it to apply, and ``reported`` the statuses that the watcher reported."""

    def __init__(self, folder: Path, text: str, reader: Reader, **flags: Any) -> None:
        self.path = folder / "baton.yaml"
        self.path.write_text(text)
        self.clock = ManualClock()
        self.settings = load_settings(self.path, **flags)
        self.applied: list[Settings] = []
        self.reported: list[SettingsStatus] = []
        self.watcher = SettingsWatcher(
            self.path, self.settings, reader, self.clock, self.reported.append
        )
        self.watcher.subscribe(self._apply)

    async def _apply(self, settings: Settings) -> None:
        self.applied.append(settings)

    async def check(self, text: str | None = None) -> list[dict[str, Any]]:
        """Write ``text``, if given, into the config file, and let the watcher check the file twice,
        as it does before it loads a change. Return the log lines."""
        if text is not None:
            self.path.write_text(text)
        with capture_logs() as lines:
            for _ in range(2):
                await self.watcher.check()
        return [dict(line) for line in lines]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("BATON_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("BATON_CONFIG", "")  # load_settings() sets it


async def test_a_live_setting_is_applied_and_reported(tmp_path: Path) -> None:
    program = WatchedProgram(tmp_path, "log_level: info\nslo_itl_seconds: 0.05\n", Reader.WORKER)
    assert await program.check() == []
    assert (program.applied, program.reported) == ([], [])
    assert await program.check("log_level: debug\nslo_itl_seconds: 0.05\n") == [{
        "event": "settings_changed", "log_level": "warning", "old": {"log_level": "info"},
        "new": {"log_level": "debug"}, "restart_needed": [],
    }]  # fmt: skip
    assert [settings.log_level for settings in program.applied] == ["debug"]
    assert program.reported == [SettingsStatus(changed={"log_level": "debug"})]
    assert await program.check("slo_itl_seconds: 0.025") == [{
        "event": "settings_changed", "log_level": "warning",
        "old": {"log_level": "debug", "slo_itl_seconds": 0.05},
        "new": {"log_level": "info", "slo_itl_seconds": 0.025}, "restart_needed": [],
    }]  # fmt: skip
    assert program.watcher.status.to_json() == {"changed": {"slo_itl_seconds": "0.025"}}
    assert len(program.applied) == 2


async def test_other_settings_need_a_restart_of_the_programs_that_read_them(tmp_path: Path) -> None:
    text = "max_sequences: 9\nstore_bytes: 1MiB\naccess_log: true\nlog_level: error\n"
    needed = {}
    for reader in Reader:
        program = WatchedProgram(tmp_path, "max_sequences: 8\n", reader)
        (line,) = await program.check(text)
        needed[reader] = program.watcher.status.restart_needed
        assert line["restart_needed"] == needed[reader]
        (applied,) = program.applied
        assert (applied.log_level, applied.store_bytes, applied.access_log) == (
            "error",
            2**28,
            False,
        )
        assert applied.max_sequences == (9 if reader is Reader.CONDUCTOR else 8)
    assert needed == {
        Reader.ROUTER: ["access_log"],
        Reader.CONDUCTOR: [],
        Reader.WORKER: ["max_sequences"],
        Reader.KVSTORE: ["store_bytes"],
        Reader.MOCK: [],
        Reader.SUPERVISOR: ["access_log", "max_sequences", "store_bytes"],
    }


async def test_a_value_that_is_set_back_needs_no_restart(tmp_path: Path) -> None:
    program = WatchedProgram(tmp_path, "max_sequences: 8", Reader.WORKER)
    await program.check("max_sequences: 9")
    (line,) = await program.check("max_sequences: 8")
    assert line["restart_needed"] == [] and program.applied == []
    assert program.reported == [SettingsStatus(restart_needed=["max_sequences"]), SettingsStatus()]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("log_level: loud", "log_level is 'loud': input should be 'debug', 'info'"),
        ("log_levle: debug", "there is no setting 'log_levle'; did you mean log_level?"),
        ("log_level: [", "config file "),
        ("min_prefill: 5\nmax_prefill: 4", "min_prefill must not be above max_prefill"),
        ("api_keys: hunter2-is-secret", "api_keys is wrong"),
    ],
)
async def test_an_invalid_file_changes_nothing(text: str, reason: str, tmp_path: Path) -> None:
    program = WatchedProgram(tmp_path, "log_level: info", Reader.ROUTER)
    await program.check("log_level: debug")
    (line,) = await program.check(text)
    assert (line["event"], line["log_level"]) == ("config_file_rejected", "warning")
    assert reason in line["error"] and "hunter2" not in line["error"]
    assert program.watcher.status == SettingsStatus({"log_level": "debug"}, [], line["error"])
    assert len(program.applied) == 1
    assert await program.check() == []  # one warning only
    assert await program.check("log_level: debug") == []
    assert program.reported[-1] == SettingsStatus({"log_level": "debug"})


async def test_settings_of_a_newer_version_are_ignored_with_one_warning(tmp_path: Path) -> None:
    """In an upgrade, pods get the ConfigMap of the newer chart before they are replaced."""
    program = WatchedProgram(tmp_path, "log_level: info", Reader.ROUTER)
    await program.check()
    newer = "written_for: 99.0.0\nlevel_of_detail: 3\nlog_level: "
    ignored, changed = await program.check(newer + "debug")
    assert (ignored["event"], ignored["log_level"]) == ("newer_settings_ignored", "warning")
    assert ignored["message"].endswith(" does not have level_of_detail")
    assert changed["new"] == {"log_level": "debug"}
    assert program.reported == [SettingsStatus({"log_level": "debug"})]
    (line,) = await program.check(newer + "error")
    assert line["event"] == "settings_changed"


async def test_a_file_that_disappears_is_rejected(tmp_path: Path) -> None:
    program = WatchedProgram(tmp_path, "log_level: debug", Reader.ROUTER)
    program.path.unlink()
    (line,) = await program.check()
    assert "No such file" in line["error"] and program.applied == []


async def test_flags_and_environment_override_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_MAX_SEQUENCES", "7")
    program = WatchedProgram(tmp_path, "", Reader.WORKER, log_level="error")
    assert await program.check("log_level: debug\nmax_sequences: 9") == []
    assert (program.applied, program.reported) == ([], [])


async def test_a_half_written_file_is_not_read(tmp_path: Path) -> None:
    """A change is loaded only once two consecutive checks have found the same content."""
    program = WatchedProgram(tmp_path, "log_level: error", Reader.ROUTER)
    await program.check()
    for text in ("", "log_level: debug\nmax_body", "log_level: debug\nmax_body_bytes: 1MiB"):
        program.path.write_text(text)
        await program.watcher.check()
    assert program.applied == [] and program.reported == []
    await program.watcher.check()
    assert [each.max_body_bytes for each in program.applied] == [2**20]


async def test_a_mounted_config_map_is_followed(tmp_path: Path) -> None:
    """The kubelet swaps the link ``..data`` to another folder; baton.yaml itself stays a link."""
    for number, level in enumerate(("info", "debug")):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "baton.yaml").write_text(f"log_level: {level}")
    (tmp_path / "..data").symlink_to("..0")
    mount = tmp_path / "mount"
    mount.mkdir()
    program = WatchedProgram(mount, "", Reader.ROUTER)
    program.path.unlink()
    program.path.symlink_to(tmp_path / "..data" / "baton.yaml")
    assert await program.check() == []
    (tmp_path / "..new").symlink_to("..1")
    (tmp_path / "..new").replace(tmp_path / "..data")
    await program.check()
    assert [each.log_level for each in program.applied] == ["debug"]


async def test_a_file_is_loaded_once_the_reason_for_its_rejection_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason may lie outside the config file: here it is a stray file among the secrets."""
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    monkeypatch.setenv("BATON_SECRETS_DIRECTORY", str(secrets))
    program = WatchedProgram(tmp_path, "log_level: info", Reader.ROUTER)
    (secrets / "stray").touch()
    (line,) = await program.check("log_level: debug")
    assert "there is no setting 'stray'" in line["error"] and program.applied == []
    (secrets / "other").touch()
    (line,) = await program.check()
    assert "there is no setting 'other'" in line["error"]
    assert await program.check() == []
    (secrets / "stray").unlink()
    (secrets / "other").unlink()
    (line,) = await program.check()
    assert line["event"] == "settings_changed"
    assert program.watcher.status == SettingsStatus({"log_level": "debug"})


async def test_the_content_that_was_looked_at_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two consecutive checks have found the same content, the watcher loads this content,
    even if the file is changed again before it is loaded."""
    program = WatchedProgram(tmp_path, "log_level: info", Reader.ROUTER)

    def reload(settings: Settings, content: bytes, warn: OnWarning) -> Settings:
        program.path.write_text("log_level: error\nslo_ttft_sec")
        return reload_settings(settings, content, warn)

    monkeypatch.setattr(settings_watcher, "reload_settings", reload)
    await program.check("log_level: debug")
    assert [each.log_level for each in program.applied] == ["debug"]
    assert program.watcher.status == SettingsStatus({"log_level": "debug"})


async def test_a_file_that_becomes_empty_is_rejected(tmp_path: Path) -> None:
    program = WatchedProgram(tmp_path, "log_level: debug", Reader.ROUTER)
    (line,) = await program.check("\n")
    assert line["error"] == (
        f"config file {program.path} is empty; write {{}} if no settings are wanted"
    )
    assert program.applied == []
    await program.check("{}")
    assert [each.log_level for each in program.applied] == ["info"]
    program = WatchedProgram(tmp_path, "", Reader.ROUTER)
    assert await program.check() == await program.check(" ") == []


async def test_a_file_that_becomes_too_large_is_rejected(tmp_path: Path) -> None:
    program = WatchedProgram(tmp_path, "log_level: debug", Reader.ROUTER)
    (line,) = await program.check("#" * (2**20 + 1))
    assert line["error"] == f"config file {program.path}: the file has more than 1048576 bytes"


async def test_a_bug_while_settings_are_loaded_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = WatchedProgram(tmp_path, "log_level: info", Reader.ROUTER)

    def reload(settings: Settings, content: bytes, warn: OnWarning) -> Settings:
        raise KeyError(content)

    monkeypatch.setattr(settings_watcher, "reload_settings", reload)
    (line,) = await program.check("log_level: debug")
    assert (line["error"], line["exc_info"]) == ("a bug: KeyError", True)
    assert await program.check() == []
    assert program.watcher.status == SettingsStatus(rejected="a bug: KeyError")


async def test_a_failing_subscriber_is_reported_and_called_again(tmp_path: Path) -> None:
    """The other subscribers get the new settings only once, while the failing one is called at each
    check until it succeeds."""
    program = WatchedProgram(tmp_path, "log_level: info", Reader.ROUTER)
    others: list[str] = []
    is_broken = True

    async def fail(settings: Settings) -> None:
        if is_broken:
            raise KeyError("x")
        others.append("repaired")

    async def other(settings: Settings) -> None:
        others.append(settings.log_level)

    program.watcher.subscribe(fail)
    program.watcher.subscribe(other)
    lines = await program.check("log_level: debug")
    assert [line["event"] for line in lines] == ["settings_not_applied", "settings_changed"]
    assert others == ["debug"] and len(program.applied) == 1
    status = SettingsStatus({"log_level": "debug"}, [], "not applied everywhere: KeyError: 'x'")
    assert program.reported == [status]
    assert await program.check() == []
    is_broken = False
    assert await program.check() == []
    assert others == ["debug", "repaired"] and len(program.applied) == 1
    assert program.reported == [status, SettingsStatus({"log_level": "debug"})]
    assert await program.check() == [] and len(others) == 2


async def test_a_bug_in_the_watcher_does_not_end_the_program(tmp_path: Path) -> None:
    program = WatchedProgram(tmp_path, "log_level: info", Reader.ROUTER)
    program.watcher._on_status = lambda status: 1 / 0  # type: ignore[assignment, return-value]
    program.path.write_text("log_level: debug")
    with capture_logs() as lines:
        watching = asyncio.create_task(program.watcher.run())
        while len(lines) < 2:
            if program.clock._sleepers:
                program.clock.advance(CONFIG_POLL_SECONDS)
            await asyncio.sleep(0.001)
        watching.cancel()
    assert [line["event"] for line in lines] == ["settings_changed", "settings_watcher_crashed"]
