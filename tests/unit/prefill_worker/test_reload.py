"""Tests the choice between fetching a prefix, recomputing it, or doing both."""

import pytest

from prefill_worker.reload_policy import ReloadMode, choose_reload_mode

CHUNK = 32


@pytest.mark.parametrize(
    ("num_blocks", "fetch", "compute", "mode"),
    [
        (100, 0.039, 0.1, ReloadMode.FETCH),
        (100, 0.041, 0.1, ReloadMode.SPLIT),
        (100, 0.249, 0.1, ReloadMode.SPLIT),
        (100, 0.251, 0.1, ReloadMode.RECOMPUTE),
        # A single chunk is computed in one step, so that it can't be split.
        (CHUNK, 0.099, 0.1, ReloadMode.FETCH),
        (CHUNK, 0.101, 0.1, ReloadMode.RECOMPUTE),
        (CHUNK + 1, 0.101, 0.1, ReloadMode.SPLIT),
        (100, 9.0, None, ReloadMode.FETCH),
    ],
)
def test_fastest_reload_mode_is_chosen(
    num_blocks: int, fetch: float, compute: float | None, mode: ReloadMode
) -> None:
    assert choose_reload_mode(num_blocks, fetch, compute, CHUNK).mode is mode


def test_configured_reload_mode_overrides_the_choice() -> None:
    assert (
        choose_reload_mode(1, 9.0, 0.1, CHUNK, preferred_mode=ReloadMode.SPLIT).mode
        is ReloadMode.SPLIT
    )
