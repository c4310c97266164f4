"""Tests the temporary folder of a process, which other processes remove after it was killed."""

import signal
import subprocess
import sys
from pathlib import Path

from baton.system.process_folder import make_process_folder

SCRIPT = """
import sys
from baton.system.process_folder import make_process_folder
print(make_process_folder("of-a-test-", sys.argv[1]), flush=True)
sys.stdin.read()
"""


def start(parent: Path) -> tuple["subprocess.Popen[str]", Path]:
    """Start a process with a folder; it exits once its input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_removed_when_its_process_has_ended(tmp_path: Path) -> None:
    exiting, removed_at_exit = start(tmp_path)
    killed, left = start(tmp_path)
    running, kept = start(tmp_path)
    other = tmp_path / "of-another-test-1"
    other.mkdir()
    assert {*tmp_path.iterdir()} == {removed_at_exit, left, kept, other}
    assert kept.stat().st_mode & 0o777 == 0o700
    exiting.communicate()
    assert not removed_at_exit.exists()
    (left / "socket").touch()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert left.exists()
    own = make_process_folder("of-a-test-", str(tmp_path))
    assert {*tmp_path.iterdir()} == {kept, other, own}
    running.communicate()
    assert {*tmp_path.iterdir()} == {other, own}
    assert [*own.iterdir()] == []
