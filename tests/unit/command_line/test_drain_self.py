"""Tests ``baton drain --self``, which a container's preStop hook runs."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from baton.clock import ManualClock
from baton.config import load_ops_settings, load_settings
from baton.errors import DeadlineExceeded, Invalid, Unavailable
from baton.serve.ops_server import OpsServer
from baton.serve.process_health import ProcessHealth
from baton.serve.termination_message import MAX_BYTES, write_termination_message
from command_line.drain_self import _drain, run_drain_self
from command_line.main import app


@pytest.fixture
def ops() -> Iterator[tuple[OpsServer, int]]:
    health = ProcessHealth(ManualClock())
    health.start()
    health.set_state("serving")
    ops = OpsServer(health, hang_timeout_seconds=20.0)
    yield ops, int(ops.open("127.0.0.1", 0).rpartition(":")[2])
    ops.close()


def test_drain_returns_when_nothing_is_left(
    ops: tuple[OpsServer, int], capsys: pytest.CaptureFixture[str]
) -> None:
    server, port = ops

    def drain() -> None:
        server.health.is_drained = True

    server.attach_program(CollectorRegistry(), drain)
    run_drain_self(load_settings(ops_host="0.0.0.0", ops_port=port), None)
    assert capsys.readouterr().out == "drained\n"


async def test_drain_waits_until_nothing_is_left(ops: tuple[OpsServer, int]) -> None:
    server, port = ops
    server.attach_program(CollectorRegistry(), lambda: server.health.set_state("draining"))
    clock = ManualClock()
    waiting = asyncio.create_task(_drain("127.0.0.1", port, 30.0, clock))
    while not clock._sleepers:
        await asyncio.sleep(0.001)
    assert server.health.state == "draining" and not waiting.done()
    server.health.is_drained = True
    clock.advance(1.0)
    assert await waiting == "drained"


async def test_drain_gives_up_after_its_timeout(ops: tuple[OpsServer, int]) -> None:
    server, port = ops
    server.attach_program(CollectorRegistry(), lambda: server.health.set_state("draining"))
    with pytest.raises(DeadlineExceeded, match="still has work after 0 s: draining"):
        await _drain("127.0.0.1", port, 0.0, ManualClock())


def test_unreachable_ops_port_is_reported() -> None:
    with pytest.raises(Unavailable, match=r"nothing responds at 127\.0\.0\.1:9: "):
        run_drain_self(load_settings(ops_port=9), 1.0)


def test_missing_ops_port_is_reported() -> None:
    with pytest.raises(Invalid, match="ops_port is None: --self needs the port"):
        run_drain_self(load_settings(), None)


def test_drain_needs_no_valid_config_file(
    ops: tuple[OpsServer, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the config file is invalid, the command uses environment variables only: Kubernetes may
    update the mounted config file at any time."""
    server, port = ops

    def drain() -> None:
        server.health.is_drained = True

    server.attach_program(CollectorRegistry(), drain)
    file = tmp_path / "baton.yaml"
    file.write_text("log_levle: debug\n")
    monkeypatch.setenv("BATON_CONFIG", str(file))
    monkeypatch.setenv("BATON_OPS_HOST", "0.0.0.0")
    monkeypatch.setenv("BATON_DRAIN_TIMEOUT_SECONDS", "7")
    monkeypatch.setenv("BATON_OPS_PORT", str(port))
    monkeypatch.setenv("BATON_REDIS_PASSWORD", "without a URL")
    result = CliRunner().invoke(app, ["drain", "--self"])
    assert (result.exit_code, result.stdout) == (0, "drained\n")
    assert "only environment variables are used" in result.stderr
    settings = load_ops_settings()
    assert (settings.drain_timeout_seconds, settings.endpoint_grace_seconds) == (7.0, 0.0)
    assert settings.ops_port == port


@pytest.mark.parametrize("port", [None, "many"])
def test_drain_without_a_port_reports_the_invalid_config_file(
    port: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("log_levle: debug\n")
    monkeypatch.setenv("BATON_CONFIG", str(file))
    if port is not None:
        monkeypatch.setenv("BATON_OPS_PORT", port)
    result = CliRunner().invoke(app, ["drain", "--self"])
    assert isinstance(result.exception, Invalid) and "log_levle" in str(result.exception)


@pytest.mark.parametrize("arguments", [["drain"], ["drain", "decode-1", "--self"]])
def test_drain_takes_either_a_worker_or_self(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, Invalid)
    assert str(result.exception) == "drain takes either a worker's name or --self"


def test_termination_message_is_written_only_if_the_file_exists(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    write_termination_message("nobody wants to know", path)
    assert not path.exists()  # not in a container
    path.touch()
    write_termination_message("model is 'x': no such directory", path)
    assert path.read_text() == "model is 'x': no such directory"
    write_termination_message("ä" * MAX_BYTES, path)
    assert path.stat().st_size == MAX_BYTES
