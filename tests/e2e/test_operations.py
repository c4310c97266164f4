"""Runs the commands in docs/operations.md and docs/tour.md one after the other on one machine."""

from pathlib import Path

import pytest

from tests.run_document import PAGE, TOUR, run_page, runnable_blocks


@pytest.mark.parametrize(
    ("page", "num_blocks"), [(PAGE, 7), (TOUR, 10)], ids=["operations", "tour"]
)
def test_commands_of_the_page_work(page: Path, num_blocks: int) -> None:
    assert len(runnable_blocks(page)) == num_blocks
    assert run_page(page) == ""
