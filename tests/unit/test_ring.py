"""The ring: even, stable, and the same in every process."""

import subprocess
import sys

import pytest

from baton.ring import successors

WORKERS = tuple(sorted(f"worker-{number}" for number in range(16)))
KEYS = [number.to_bytes(4, "big") for number in range(8000)]


def first(ids: tuple[str, ...], key: bytes) -> str:
    return next(successors(ids, key))


def test_everybody_follows_once() -> None:
    for key in KEYS[:50]:
        assert sorted(successors(WORKERS, key)) == list(WORKERS)


def test_load_is_even() -> None:
    counts = dict.fromkeys(WORKERS, 0)
    for key in KEYS:
        counts[first(WORKERS, key)] += 1
    mean = len(KEYS) / len(WORKERS)
    deviation = (sum((n - mean) ** 2 for n in counts.values()) / len(WORKERS)) ** 0.5
    assert deviation / mean < 0.12


def test_a_leaver_moves_its_own_keys_alone() -> None:
    gone = WORKERS[5]
    rest = tuple(name for name in WORKERS if name != gone)
    moved = 0
    for key in KEYS:
        before, after = first(WORKERS, key), first(rest, key)
        if before == gone:
            moved += 1
            # It goes where the ring would have gone next.
            assert after == next(name for name in successors(WORKERS, key) if name != gone)
        else:
            assert after == before
    assert 0.5 / len(WORKERS) < moved / len(KEYS) < 2 / len(WORKERS)


def test_ids_must_be_sorted() -> None:
    with pytest.raises(AssertionError, match="sorted ids"):
        first(("b", "a"), b"k")


def test_other_processes_agree() -> None:
    code = "from baton.ring import successors; print(*successors(('a', 'b', 'c', 'd'), b'key'))"
    for hash_seed in ("1", "2"):
        answer = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        assert answer.stdout.split() == list(successors(("a", "b", "c", "d"), b"key"))
