"""Reload, recompute, or both."""

import pytest

from baton.worker.reload_policy import ReloadMode, choose_way

CHUNK = 32


@pytest.mark.parametrize(
    ("num_blocks", "fetch", "compute", "way"),
    [
        (100, 0.039, 0.1, ReloadMode.FETCH),
        (100, 0.041, 0.1, ReloadMode.SPLIT),
        (100, 0.249, 0.1, ReloadMode.SPLIT),
        (100, 0.251, 0.1, ReloadMode.RECOMPUTE),
        # One chunk is computed at once: there are no two ends.
        (CHUNK, 0.099, 0.1, ReloadMode.FETCH),
        (CHUNK, 0.101, 0.1, ReloadMode.RECOMPUTE),
        (CHUNK + 1, 0.101, 0.1, ReloadMode.SPLIT),
        (100, 9.0, None, ReloadMode.FETCH),
    ],
)
def test_what_is_faster(
    num_blocks: int, fetch: float, compute: float | None, way: ReloadMode
) -> None:
    assert choose_way(num_blocks, fetch, compute, CHUNK).way is way


def test_an_operator_has_the_last_word() -> None:
    assert choose_way(1, 9.0, 0.1, CHUNK, prefer=ReloadMode.SPLIT).way is ReloadMode.SPLIT
