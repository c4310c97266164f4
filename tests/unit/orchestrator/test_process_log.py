"""Tests the limit of a process's log."""

import asyncio
import errno
import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from baton.clock import ManualClock
from orchestrator import process_log
from orchestrator.process_log import CHECK_SECONDS, ProcessLog

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)\nprint('end')"


@contextmanager
def writing_process(log: ProcessLog) -> Iterator["subprocess.Popen[str]"]:
    """A process that writes to the log what it reads, and a last line when its input ends."""
    with log.open() as file:
        process = subprocess.Popen(
            [sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=file, text=True
        )
    with process:
        try:
            yield process
        finally:
            process.kill()


def write(process: "subprocess.Popen[str]", log: ProcessLog, text: str) -> None:
    """Write a line, and return when it is in the log."""
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()
    while not log.path.read_text().endswith(text + "\n"):
        assert process.poll() is None


def shown(log: ProcessLog) -> str:
    output = io.StringIO()
    log.write_to(output)
    return output.getvalue()


def test_a_log_is_divided_while_its_process_writes_it(tmp_path: Path) -> None:
    log = ProcessLog(tmp_path / "router.log", max_bytes=10)
    with writing_process(log) as process:
        write(process, log, "0123456789")
        assert log.limit()
        assert log.path.read_bytes() == b""
        assert log.last_line() == "0123456789"
        write(process, log, "short")
        assert not log.limit()
        assert shown(log) == "0123456789\nshort\n"
        assert log.last_line() == "short"
        write(process, log, "longer line")
        assert log.limit()
        assert shown(log) == "short\nlonger line\n"
        process.communicate()
    assert shown(log) == "short\nlonger line\nend\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["router.log", "router.log.1"]


async def test_a_log_is_checked_until_cancelled(tmp_path: Path) -> None:
    log, clock = ProcessLog(tmp_path / "router.log", max_bytes=10), ManualClock()
    log.path.write_text("0123456789\n")
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        checking = tasks.create_task(log.keep_limited(clock))
        await asyncio.sleep(0)
        assert log.path.stat().st_size == 11
        while log.path.stat().st_size:
            clock.advance(CHECK_SECONDS)
            await asyncio.sleep(0)
        checking.cancel()
    assert shown(log) == "0123456789\n"


def test_a_fast_writer_does_not_make_the_earlier_part_endless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_log, "COPY_BYTES", 4)
    log = ProcessLog(tmp_path / "router.log", max_bytes=10)
    log.path.write_text("x" * 1000)
    assert log.limit()
    assert shown(log) == "x" * 20


def test_text_is_dropped_if_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ProcessLog(tmp_path / "router.log", max_bytes=10)
    log.path.write_text("0123456789\n")

    def fail(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with structlog.testing.capture_logs() as events:
        assert log.limit()
    assert [event["event"] for event in events] == ["log_dropped"]
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("router.log", 0)]


def test_a_log_without_text_says_where_it_is(tmp_path: Path) -> None:
    log = ProcessLog(tmp_path / "router.log")
    assert not log.limit()
    assert log.last_line() == f"it logged nothing; see {log.path}"
    with pytest.raises(FileNotFoundError):
        log.write_to(io.StringIO())


def test_the_last_line_has_no_prefix(tmp_path: Path) -> None:
    log = ProcessLog(tmp_path / "router.log")
    log.path.write_text("first\nbaton: the port is in use\n")
    assert log.last_line() == "the port is in use"
