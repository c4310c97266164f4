"""Tests that a cluster's folder has one owner at a time, keeps the cluster's state private, and
that the state is never read while it is partly written."""

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
    """Start another process that owns the folder until it is killed."""
    code = (
        "import sys; from pathlib import Path; from orchestrator.cluster_state import *; "
        f"f = ClusterFolder(Path({str(home)!r}), 'c'); f.acquire(); "
        "print('taken', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"taken\n"
    return process


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path, "c")
    assert not folder.is_locked()
    other = owner_elsewhere(tmp_path)
    assert folder.is_locked()
    with pytest.raises(Invalid, match="a cluster named 'c' is already running: run `baton down"):
        folder.acquire()
    other.kill()
    other.communicate()
    assert not folder.is_locked()
    folder.acquire()
    folder.release()


def test_state_file_is_private_and_round_trips(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path, "c")
    folder.acquire()
    assert folder.read_state() is None
    written = state(cluster_secret="s", processes=[ProcessState("a", "router", 1, "serving")])
    folder.write_state(written)
    assert folder.read_state() == written
    assert (folder.path / "state.json").stat().st_mode & 0o777 == 0o600
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"processes": [{"a": 1}]}', '{"url": "u"}'])
def test_invalid_state_file_reads_as_none(tmp_path: Path, text: str) -> None:
    folder = ClusterFolder(tmp_path, "c")
    folder.create()
    (folder.path / "state.json").write_text(text)
    assert folder.read_state() is None


def test_state_without_an_owner_is_not_a_running_cluster(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path, "c")
    folder.create()
    folder.write_state(state())
    with pytest.raises(
        NotFound, match="no cluster named 'c' is running here: start it with `baton up`"
    ):
        folder.read_running()


def test_new_owner_keeps_the_previous_logs(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path, "c")
    folder.create()
    folder.write_state(state())
    (folder.logs / "router.log").write_text("old")
    (folder.logs / "router.log.1").write_text("earlier")
    folder.acquire()
    assert (folder.logs / "router.log.old").read_text() == "old"
    assert [path.name for path in folder.logs.iterdir()] == ["router.log.old"]
    assert folder.read_state() is None
    folder.release()


def test_signalling_an_owner_that_has_just_ended_raises_not_found(tmp_path: Path) -> None:
    folder, other = ClusterFolder(tmp_path, "c"), owner_elsewhere(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder.write_state(state(supervisor_pid=gone.pid))
    with pytest.raises(NotFound, match="has just stopped"):
        folder.signal_supervisor(signal.SIGTERM)
    other.kill()
    other.communicate()


def test_state_file_is_plain_json(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path, "c")
    folder.create()
    folder.write_state(state(ready=True))
    assert json.loads((folder.path / "state.json").read_text())["ready"] is True
