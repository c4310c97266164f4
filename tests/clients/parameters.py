"""Makes the tests' parameters from the cases of all programs."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.clients.expected import Cases
from tests.clients.programs import Program


def each_case(programs: Mapping[Program, Cases]) -> list[Any]:
    """Return the program, the name and the expected result of each case. The cases of a program
    whose client is not installed are skipped."""
    return [
        _parameter(program, case, expected)
        for program, cases in programs.items()
        for case, expected in cases.items()
    ]


def _parameter(program: Program, case: str, expected: Any) -> Any:
    skip = pytest.mark.skipif(bool(program.missing), reason=program.missing)
    name = f"{program.name}-{case}".replace(" ", "_")
    return pytest.param(program, case, expected, marks=skip, id=name)
