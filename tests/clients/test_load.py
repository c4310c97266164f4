"""Tests that the counts of load tools are Baton's."""

from typing import Any

import pytest

from tests.clients.conftest import RunProgram
from tests.clients.expected import LOAD_PROGRAMS
from tests.clients.parameters import each_case
from tests.clients.programs import Program

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(("program", "case", "expected"), each_case(LOAD_PROGRAMS))
def test_load_tool(run_program: RunProgram, program: Program, case: str, expected: Any) -> None:
    assert run_program(program)[case] == {"result": expected}
