"""The tests' parameters: each case of each program."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.clients.expected import Cases
from tests.clients.programs import Program


def each_case(programs: Mapping[Program, Cases]) -> list[Any]:
    """Return program, name and expected result of each case. A program whose client is missing on
    this machine is skipped."""
    return [
        _parameter(program, case, expected)
        for program, cases in programs.items()
        for case, expected in cases.items()
    ]


def _parameter(program: Program, case: str, expected: Any) -> Any:
    skip = pytest.mark.skipif(bool(program.missing), reason=program.missing)
    name = f"{program.name}-{case}".replace(" ", "_")
    return pytest.param(program, case, expected, marks=skip, id=name)
