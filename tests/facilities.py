"""Switches the tests of one process to the portable facilities and back."""

from collections.abc import Iterator
from contextlib import contextmanager

from baton.system import portability


@contextmanager
def facilities(is_portable: bool) -> Iterator[None]:
    before = portability._is_portable
    portability.set_portable(is_portable)
    try:
        yield
    finally:
        portability.set_portable(before)
