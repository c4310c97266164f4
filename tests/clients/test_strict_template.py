"""Tests agents that send several system messages, with a model whose chat template is strict: the
answers are the same."""

from collections.abc import Iterator
from typing import Any

import pytest

from testkit.local_cluster import local_cluster
from tests.clients.chat_template import STRICT_CHAT_TEMPLATE
from tests.clients.conftest import MODEL, variables_of
from tests.clients.expected import MESSAGES_PROGRAMS, RESPONSES_PROGRAMS
from tests.clients.programs import Program
from tests.clients.scripted_model import make_scripted_model

pytestmark = pytest.mark.timeout(300)

AGENTS = [
    pytest.param(
        program,
        cases,
        id=program.name,
        marks=pytest.mark.skipif(bool(program.missing), reason=program.missing),
    )
    for program, cases in [*RESPONSES_PROGRAMS.items(), *MESSAGES_PROGRAMS.items()]
    if program.file in ("codex.mjs", "claude_code.mjs")
]


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment variables of a program that uses a cluster with the strict template."""
    folder = tmp_path_factory.mktemp("strict") / MODEL
    model = make_scripted_model(folder, STRICT_CHAT_TEMPLATE)
    with local_cluster(model) as running:
        yield variables_of(running.url, model)


@pytest.mark.parametrize(("agent", "expected"), AGENTS)
def test_agent(strict: dict[str, str], agent: Program, expected: dict[str, Any]) -> None:
    answers = agent.run(strict)
    assert answers == {case: {"result": result} for case, result in expected.items()}


def test_both_agents_are_tested() -> None:
    assert len(AGENTS) == 2
