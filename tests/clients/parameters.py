"""Makes the tests' parameters from the cases of all programs."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.clients.expected import Cases
from tests.clients.programs import Program


def each_case(programs: Mapping[Program, Cases]) -> list[Any]:
    """Return a pytest parameter for each case: the test program that runs it, its name and its
    expected result. If the client library that a program uses is not installed, the program's cases
    are marked to be skipped."""
    return [
        _parameter(program, case, expected)
        for program, cases in programs.items()
        for case, expected in cases.items()
    ]


def _parameter(program: Program, case: str, expected: Any) -> Any:
    skip = pytest.mark.skipif(bool(program.missing), reason=program.missing)
    name = f"{program.name}-{case}".replace(" ", "_")
    return pytest.param(program, case, expected, marks=skip, id=name)
