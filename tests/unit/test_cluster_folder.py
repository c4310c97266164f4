"""A cluster's folder: one owner, private state, and readers that never see half of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.errors import Invalid, NotFound
from orchestrator.cluster_state import ClusterFolder, ClusterState, ProcessState


def state(**changes: object) -> ClusterState:
    fields = {"supervisor_pid": os.getpid(), "url": "u", "redis_url": "r", "cluster": "c"}
    return ClusterState(**(fields | changes))  # type: ignore[arg-type]


def owner_elsewhere(home: Path) -> "subprocess.Popen[bytes]":
    """Another process that owns the folder until it is killed."""
    code = (
        "import sys; from pathlib import Path; from orchestrator.cluster_state import *; "
        f"f = ClusterFolder(Path({str(home)!r}), 'c'); f.take(); "
        "print('taken', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"taken\n"
    return process


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path, "c")
    assert not folder.is_owned()
    other = owner_elsewhere(tmp_path)
    assert folder.is_owned()
    with pytest.raises(Invalid, match="a cluster named 'c' is running already: `baton down"):
        folder.take()
    other.kill()
    other.communicate()
    assert not folder.is_owned()
    folder.take()
    folder.release()


def test_state_is_private_and_whole(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path, "c")
    folder.take()
    assert folder.read() is None
    written = state(cluster_secret="s", processes=[ProcessState("a", "router", 1, "serving")])
    folder.write(written)
    assert folder.read() == written
    assert (folder.path / "state.json").stat().st_mode & 0o777 == 0o600
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"processes": [{"a": 1}]}', '{"url": "u"}'])
def test_what_is_no_state_is_none(tmp_path: Path, text: str) -> None:
    folder = ClusterFolder(tmp_path, "c")
    folder.make()
    (folder.path / "state.json").write_text(text)
    assert folder.read() is None


def test_a_state_without_an_owner_is_history(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path, "c")
    folder.make()
    folder.write(state())
    with pytest.raises(NotFound, match="no cluster named 'c' is running here: `baton up`"):
        folder.running()


def test_a_new_owner_keeps_the_last_logs(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path, "c")
    folder.make()
    folder.write(state())
    (folder.logs / "router.log").write_text("old")
    folder.take()
    assert (folder.logs / "router.log.old").read_text() == "old"
    assert not (folder.logs / "router.log").exists()
    assert folder.read() is None
    folder.release()


def test_an_owner_that_has_just_ended(tmp_path: Path) -> None:
    folder, other = ClusterFolder(tmp_path, "c"), owner_elsewhere(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder.write(state(supervisor_pid=gone.pid))
    with pytest.raises(NotFound, match="has just ended"):
        folder.signal_owner(signal.SIGTERM)
    other.kill()
    other.communicate()


def test_the_file_is_what_other_programs_read(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path, "c")
    folder.make()
    folder.write(state(ready=True))
    assert json.loads((folder.path / "state.json").read_text())["ready"] is True
