"""Tests that a process goes on when its output can't be written, and says afterwards how much was
lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import resource, sys
import structlog
from baton.obs.logs import configure_logging
from baton.obs.lost_writes import LOST_WRITES, tolerate_lost_output
tolerate_lost_output()
configure_logging("info", "json")
log = structlog.get_logger()
"""

PRINT_AND_LOG = """
print("a line", flush=True)
log.info("a_line")
open(sys.argv[1], "w").write(str(sorted(LOST_WRITES.counts.items())))
"""

FULL_FOR_TWO_LINES = """
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
log.info("first")
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
log.info("second")
log.info("third")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.info("fourth")
log.info("fifth")
"""


@pytest.mark.parametrize(
    ("redirection", "lost"),
    [
        (">/dev/full 2>/dev/full", [("stderr", 1), ("stdout", 1)]),
        (">/dev/full 2>/dev/null", [("stdout", 1)]),
        (">&- 2>&- <&-", []),
    ],
)
def test_a_process_survives_output_that_can_not_be_written(
    redirection: str, lost: list[tuple[str, int]], tmp_path: Path
) -> None:
    script = f'"$0" -c "$1" "$2" {redirection}'
    arguments = [sys.executable, PRELUDE + PRINT_AND_LOG, str(tmp_path / "lost")]
    assert subprocess.run(["sh", "-c", script, *arguments]).returncode == 0
    assert (tmp_path / "lost").read_text() == str(lost)


def test_a_process_survives_the_reader_of_its_output(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", PRELUDE + PRINT_AND_LOG, str(tmp_path / "lost")]
    assert subprocess.run(command, stdout=writing, stderr=writing).returncode == 0
    os.close(writing)
    assert (tmp_path / "lost").read_text() == str([("stderr", 1), ("stdout", 1)])


def test_the_log_says_how_much_was_lost_once_it_can_be_written_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        subprocess.run(
            [sys.executable, "-c", PRELUDE + FULL_FOR_TWO_LINES], stderr=file, check=True
        )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["first", "fourth", "writes_lost", "fifth"]
    assert (lines[2]["file"], lines[2]["writes"]) == ("stderr", 2)
