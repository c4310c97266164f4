"""docs/operations.md, followed word by word on one machine."""

from tools.follow import PAGE, blocks, follow


def test_what_the_page_says_works() -> None:
    assert len(blocks(PAGE)) == 7
    assert follow(PAGE) == ""
