"""Switches the tests of one process to the portable facilities and back."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from baton.system import portability

ON_LINUX = sys.platform == "linux"

FACILITIES = ["linux", "portable"] if ON_LINUX else ["portable"]
"""The kinds of facilities that can be tested here."""


@contextmanager
def facilities(is_portable: bool) -> Iterator[None]:
    before = portability._is_portable
    portability.set_portable(is_portable)
    try:
        yield
    finally:
        portability.set_portable(before)
