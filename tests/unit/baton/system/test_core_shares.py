"""Tests how workers of a host divide its cores, with several workers in this process."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.system.core_shares import (
    BETWEEN_STEPS_SECONDS,
    MAX_WORKERS,
    SUSPICIOUS_SECONDS,
    CoreShare,
    CoreShares,
)

CORES = (2, 3, 5, 7, 11)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


class Host:
    """The workers of a host, whose slots are freed at the end of the test."""

    def __init__(self, folder: Path, clock: ManualClock) -> None:
        self.folder, self.clock = folder, clock
        self._workers: list[CoreShares] = []

    def join(self, cores: tuple[int, ...] = CORES) -> CoreShares:
        shares = CoreShares.join(self.folder, cores, self.clock.monotonic)
        assert shares is not None
        self._workers.append(shares)
        return shares

    def close(self) -> None:
        for worker in self._workers:
            worker.leave()


@pytest.fixture
def host(tmp_path: Path, clock: ManualClock) -> Iterator[Host]:
    host = Host(tmp_path, clock)
    yield host
    host.close()


def test_lone_worker_uses_all_cores(host: Host) -> None:
    alone, idle = host.join(), host.join()
    assert idle.number == 1
    for _ in range(2):
        assert alone.begin_step() == CoreShare(5, CORES)
        alone.end_step()


def test_busy_workers_have_different_cores(host: Host) -> None:
    workers = [host.join() for _ in range(3)]
    workers[0].begin_step()
    workers[2].begin_step()
    assert workers[0].begin_step() == CoreShare(2, (2, 3))
    assert workers[2].begin_step() == CoreShare(3, (5, 7, 11))
    shares = [worker.begin_step().cores for worker in workers]
    assert shares[1:] == [(3, 5), (7, 11)]
    assert workers[0].begin_step().cores == (2,)


def test_pause_between_two_steps_is_no_idleness(host: Host) -> None:
    first, second = host.join(), host.join()
    second.begin_step()
    second.end_step()
    host.clock.advance(BETWEEN_STEPS_SECONDS / 2)
    assert first.begin_step().cores == (2, 3)
    host.clock.advance(BETWEEN_STEPS_SECONDS)
    assert first.begin_step().cores == CORES


def test_more_workers_than_cores_have_one_thread_each(host: Host) -> None:
    workers = [host.join((0, 1)) for _ in range(3)]
    for worker in workers:
        worker.begin_step()
    assert workers[1].begin_step() == CoreShare(1, (0, 1))


def test_killed_worker_is_noticed(host: Host) -> None:
    program = (
        "import sys; from pathlib import Path; from baton.system.core_shares import CoreShares\n"
        "shares = CoreShares.join(Path(sys.argv[1]), (0, 1), lambda: 1000.0)\n"
        "shares.begin_step(); print(shares.number, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(host.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "0\n"
        worker = host.join((0, 1))
        host.clock.advance(SUSPICIOUS_SECONDS * 2)
        assert worker.begin_step().cores == (1,)  # a long step of a worker that is there
        other.kill()
        other.wait()
    assert worker.begin_step().cores == (0, 1)
    assert host.join((0, 1)).number == 0


@pytest.mark.parametrize("ended", [True, False])
def test_times_from_before_the_host_was_started_do_not_count(host: Host, ended: bool) -> None:
    before, after = host.join(), CoreShares.join(host.folder, CORES, lambda: 5.0)
    assert after is not None
    before.begin_step()
    if ended:
        before.end_step()
    file = host.folder / "cores-8ac"  # the bits of CORES
    slots = file.read_bytes()
    before.leave()
    file.write_bytes(slots)
    assert after.begin_step().cores == CORES
    after.leave()


def test_slot_is_free_after_leaving(host: Host) -> None:
    first, second = host.join(), host.join()
    first.begin_step()
    first.leave()
    assert second.begin_step().cores == CORES
    assert host.join().number == 0


def test_workers_that_may_use_other_cores_do_not_count(host: Host) -> None:
    first, second = host.join((0, 1)), host.join((2, 3))
    first.begin_step()
    assert second.begin_step() == CoreShare(2, (2, 3))


def test_no_slot_is_left(host: Host) -> None:
    workers = [host.join() for _ in range(MAX_WORKERS)]
    assert [worker.number for worker in workers] == list(range(MAX_WORKERS))
    assert CoreShares.join(host.folder, CORES, host.clock.monotonic) is None


def test_folder_that_is_not_there(tmp_path: Path, clock: ManualClock) -> None:
    assert CoreShares.join(tmp_path / "missing", CORES, clock.monotonic) is None
