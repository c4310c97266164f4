"""Tests that the ranks of a worker with engine vllm are killed if one of them dies or is frozen."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import psutil
import pytest

from baton.vllm_engine.rank_monitor import RankHeartbeats, RankMonitor, send_heartbeats

HANG_TIMEOUT_SECONDS = 3.0


def run_rank(path: str, rank: int) -> None:
    send_heartbeats(path, rank)
    threading.Event().wait()


@pytest.fixture
def heartbeats() -> RankHeartbeats:
    return RankHeartbeats(2)


@pytest.fixture
def ranks(heartbeats: RankHeartbeats) -> Iterator[list[BaseProcess]]:
    spawn = multiprocessing.get_context("spawn")
    started = [
        spawn.Process(target=run_rank, args=(heartbeats.path, rank), daemon=True)
        for rank in range(2)
    ]
    for rank in started:
        rank.start()
    while not all(heartbeats.counts()):
        threading.Event().wait(0.01)  # the test's timeout bounds this
    yield started
    for rank in started:
        rank.kill()
        rank.join()


def monitor(
    ranks: list[BaseProcess],
    heartbeats: RankHeartbeats,
    hang_timeout_seconds: float = HANG_TIMEOUT_SECONDS,
) -> RankMonitor:
    started = RankMonitor(ranks, heartbeats, hang_timeout_seconds)
    started.start()
    return started


def signal_rank(rank: BaseProcess, number: signal.Signals) -> None:
    assert rank.pid is not None
    os.kill(rank.pid, number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_or_is_frozen_ends_all(
    number: signal.Signals, victim: int, ranks: list[BaseProcess], heartbeats: RankHeartbeats
) -> None:
    watching = monitor(ranks, heartbeats)
    signal_rank(ranks[victim], number)
    for rank in ranks:
        rank.join()
        assert rank.exitcode == -signal.SIGKILL
    watching.stop()


def test_ranks_stay_while_they_send_heartbeats_and_after_the_monitor_was_stopped(
    ranks: list[BaseProcess], heartbeats: RankHeartbeats
) -> None:
    watching = monitor(ranks, heartbeats)
    ranks[0].join(HANG_TIMEOUT_SECONDS + 1)
    watching.stop()
    assert all(rank.is_alive() for rank in ranks)
    signal_rank(ranks[0], signal.SIGKILL)
    ranks[0].join()
    assert ranks[1].is_alive()


def test_a_frozen_rank_stays_if_hangs_are_not_detected(
    ranks: list[BaseProcess], heartbeats: RankHeartbeats
) -> None:
    watching = monitor(ranks, heartbeats, hang_timeout_seconds=0)
    signal_rank(ranks[1], signal.SIGSTOP)
    ranks[0].join(HANG_TIMEOUT_SECONDS + 2)
    assert psutil.Process(ranks[1].pid).status() == psutil.STATUS_STOPPED
    assert ranks[0].is_alive()
    watching.stop()
