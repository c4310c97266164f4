"""``baton drain --self``: what a container's preStop hook runs."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from baton.clock import ManualClock
from baton.config import load_settings
from baton.errors import DeadlineExceeded, Invalid, Unavailable
from baton.serve.ops_server import OpsServer
from baton.serve.process_health import ProcessHealth
from baton.serve.termination_message import MAX_BYTES, write_termination_message
from command_line.drain_self import _drain, run_drain_self
from command_line.main import app


@pytest.fixture
def ops() -> Iterator[tuple[OpsServer, int]]:
    vitals = ProcessHealth(ManualClock())
    vitals.begin()
    vitals.move("serving")
    ops = OpsServer(vitals, hung_seconds=20.0)
    yield ops, int(ops.open("127.0.0.1", 0).rpartition(":")[2])
    ops.close()


def test_who_has_nothing_left(
    ops: tuple[OpsServer, int], capsys: pytest.CaptureFixture[str]
) -> None:
    server, port = ops

    def drain() -> None:
        server.vitals.drained = True

    server.watch(CollectorRegistry(), drain)
    run_drain_self(load_settings(ops_host="0.0.0.0", ops_port=port), None)
    assert capsys.readouterr().out == "drained\n"


async def test_it_waits_until_nothing_is_left(ops: tuple[OpsServer, int]) -> None:
    server, port = ops
    server.watch(CollectorRegistry(), lambda: server.vitals.move("draining"))
    clock = ManualClock()
    waiting = asyncio.create_task(_drain("127.0.0.1", port, 30.0, clock))
    while not clock._sleepers:
        await asyncio.sleep(0.001)
    assert server.vitals.state == "draining" and not waiting.done()
    server.vitals.drained = True
    clock.advance(1.0)
    assert await waiting == "drained"


async def test_it_gives_up_in_the_end(ops: tuple[OpsServer, int]) -> None:
    server, port = ops
    server.watch(CollectorRegistry(), lambda: server.vitals.move("draining"))
    with pytest.raises(DeadlineExceeded, match="after 0 s something is left to do: draining"):
        await _drain("127.0.0.1", port, 0.0, ManualClock())


def test_nobody_is_there() -> None:
    with pytest.raises(Unavailable, match=r"nobody answers at 127\.0\.0\.1:9: "):
        run_drain_self(load_settings(ops_port=9), 1.0)


def test_without_a_port() -> None:
    with pytest.raises(Invalid, match="ops_port is None: --self asks the program"):
        run_drain_self(load_settings(), None)


@pytest.mark.parametrize("arguments", [["drain"], ["drain", "decode-1", "--self"]])
def test_one_or_the_other(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, Invalid)
    assert str(result.exception) == "drain takes a worker's name, or --self"


def test_last_words(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    write_termination_message("nobody wants to know", path)
    assert not path.exists()  # not in a container
    path.touch()
    write_termination_message("model is 'x': no such directory", path)
    assert path.read_text() == "model is 'x': no such directory"
    write_termination_message("ä" * MAX_BYTES, path)
    assert path.stat().st_size == MAX_BYTES
