"""Tests ``baton status --wait`` and ``baton check`` on a cluster with a process that doesn't
serve."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import DeadlineExceeded, Unavailable
from command_line.check import show_check
from command_line.status import wait_until_ready
from orchestrator.cluster_state import ClusterFolder, ClusterState, ProcessState

UNREACHABLE = "127.0.0.1:1"


def state(ready: bool) -> ClusterState:
    processes = [
        ProcessState("prefill-0", "prefill", 1, "serving", UNREACHABLE),
        ProcessState("decode-0", "decode", 2, "serving" if ready else "restarting"),
    ]
    return ClusterState(1, "http://127.0.0.1:1", "", "c", ready=ready, processes=processes)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterFolder]:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    folder = ClusterFolder(tmp_path, "c")
    folder.acquire()
    yield folder
    folder.release()


def test_waiting_for_a_cluster_names_the_processes_that_do_not_serve(folder: ClusterFolder) -> None:
    folder.write_state(state(ready=False))
    with pytest.raises(DeadlineExceeded, match=r"is not ready after 0 s: decode-0 is restarting$"):
        wait_until_ready("c", 0)
    folder.write_state(state(ready=True))
    wait_until_ready("c", 0)


@pytest.mark.parametrize("ready", [True, False])
def test_waiting_ends_with_an_error_if_a_process_has_failed_for_good(
    folder: ClusterFolder, ready: bool
) -> None:
    """A cluster stays ready if a worker that was added later can't start, so failed processes must
    be reported separately."""
    failed = state(ready=ready)
    failed.processes.append(ProcessState("decode-1", "decode", 0, "failed", message="no memory"))
    folder.write_state(failed)
    with pytest.raises(Unavailable, match=r"^decode-1 has failed: no memory$"):
        wait_until_ready("c", 60)


def test_check_reports_a_frozen_member(
    folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def inspect(address: str, trust: object) -> None:
        raise DeadlineExceeded("no answer in 5 s")

    monkeypatch.setattr("baton.rpc.worker_client.inspect_worker", inspect)
    folder.write_state(state(ready=False))
    with pytest.raises(Unavailable, match=r"^prefill-0, decode-0 did not answer$"):
        show_check("c", as_json=False)
    assert "prefill-0    no answer: no answer in 5 s" in capsys.readouterr().out


def test_check_reports_every_member_although_some_do_not_answer(
    folder: ClusterFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write_state(state(ready=False))
    with pytest.raises(Unavailable, match=r"^prefill-0, decode-0 did not answer$"):
        show_check("c", as_json=False)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("prefill-0    no answer: ")
    assert second == "decode-0     no answer: it is restarting"
