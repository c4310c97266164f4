"""The commands in docs/operations.md, run one after the other on one machine."""

from tools.run_document import PAGE, run_page, runnable_blocks


def test_the_commands_of_the_operations_guide_work() -> None:
    assert len(runnable_blocks(PAGE)) == 7
    assert run_page(PAGE) == ""
