"""Notices that a rank (one of the processes of vLLM's workers) has died or is frozen.

Each rank counts its heartbeats in a memory file that is mapped by all ranks and by the process of
the Baton worker. vLLM itself notices a rank that has died, but then waits for seconds until the
other ranks end, which wait for the dead one in a collective operation. It notices a frozen rank
only when a step times out.
"""

import mmap
import os
import struct
import threading
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import structlog

from baton.system.memory_file import create_memory_file
from baton.vllm_engine.memory_path import memory_path

HEARTBEAT_SECONDS = 1.0
MIN_MISSED_HEARTBEATS = 3
"""A rank counts as frozen only after at least this many missed heartbeats."""

_COUNT = struct.Struct("=Q")

log = structlog.get_logger(__name__)


class RankHeartbeats:
    """Counts of the heartbeats of ``num_ranks`` ranks, in an anonymous memory file."""

    def __init__(self, num_ranks: int) -> None:
        size_bytes = num_ranks * _COUNT.size
        self._file = create_memory_file("baton-rank-heartbeats", size_bytes)
        self._memory = mmap.mmap(self._file, size_bytes)
        self.path = memory_path(self._file)
        """The path by which the ranks open the file."""

    def counts(self) -> list[int]:
        return [count for (count,) in _COUNT.iter_unpack(self._memory[:])]

    def close(self) -> None:
        self._memory.close()
        os.close(self._file)


def send_heartbeats(path: str, rank: int) -> None:
    """Start a thread that counts the heartbeats of this rank until the process ends. ``path`` is
    :attr:`RankHeartbeats.path`."""
    with Path(path).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)

    def count_heartbeats() -> None:
        never, count = threading.Event(), 0
        while not never.wait(HEARTBEAT_SECONDS):
            count += 1
            _COUNT.pack_into(memory, rank * _COUNT.size, count)

    threading.Thread(target=count_heartbeats, name="heartbeats", daemon=True).start()


class RankMonitor:
    """Kills all ranks as soon as one of them has died, or has sent no heartbeat for
    ``hang_timeout_seconds`` (0 turns this check off). vLLM then reports the failure at once, since
    no rank is left for which it would wait."""

    def __init__(
        self, ranks: Sequence[BaseProcess], heartbeats: RankHeartbeats, hang_timeout_seconds: float
    ) -> None:
        self._ranks = ranks
        self._sentinels: list[int] = [rank.sentinel for rank in ranks]
        self._heartbeats = heartbeats
        self._max_missed = max(hang_timeout_seconds / HEARTBEAT_SECONDS, MIN_MISSED_HEARTBEATS)
        self._detects_hangs = hang_timeout_seconds > 0
        self._stop_reader, self._stop_writer = connection.Pipe(duplex=False)
        self._counts = heartbeats.counts()
        self._missed = [0] * len(ranks)
        self._thread = threading.Thread(target=self._run, name="rank monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop monitoring. Call this before the ranks are stopped."""
        self._stop_writer.close()
        self._thread.join()
        self._stop_reader.close()
        self._heartbeats.close()

    def _run(self) -> None:
        waits: list[connection.Connection[Any, Any] | int] = [self._stop_reader, *self._sentinels]
        while self._stop_reader not in (ended := connection.wait(waits, HEARTBEAT_SECONDS)):
            self._count_missed_heartbeats()
            reasons = [
                self._failure(number, sentinel in ended)
                for number, sentinel in enumerate(self._sentinels)
            ]
            if any(reasons):
                self._kill_ranks(reasons)
                return

    def _count_missed_heartbeats(self) -> None:
        """Update how many heartbeats each rank has missed in a row. Heartbeats are counted instead
        of measuring the time since the last one, so that a pause of this process itself has no
        effect."""
        before, self._counts = self._counts, self._heartbeats.counts()
        self._missed = [
            num_missed + 1 if count == last else 0
            for num_missed, count, last in zip(self._missed, self._counts, before, strict=True)
        ]

    def _failure(self, number: int, has_ended: bool) -> str:
        """Return what is wrong with a rank; an empty text if nothing is."""
        if has_ended:
            return "it died"
        is_hung = self._detects_hangs and self._missed[number] >= self._max_missed
        return "it sent no heartbeats" if is_hung else ""

    def _kill_ranks(self, reasons: Sequence[str]) -> None:
        for number, reason in enumerate(reasons):
            if reason:
                log.error("rank_failed", rank=number, reason=reason)
        for rank in self._ranks:
            rank.kill()
