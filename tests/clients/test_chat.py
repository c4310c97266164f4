"""Tests Baton with clients of OpenAI's chat completions and completions."""

from typing import Any

import pytest

from tests.clients.conftest import RunProgram
from tests.clients.expected import CHAT_PROGRAMS
from tests.clients.parameters import each_case
from tests.clients.programs import Program

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(("program", "case", "expected"), each_case(CHAT_PROGRAMS))
def test_client(run_program: RunProgram, program: Program, case: str, expected: Any) -> None:
    assert run_program(program)[case] == {"result": expected}
