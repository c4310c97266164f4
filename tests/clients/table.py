"""Renders the table of results: client, version, API, what ran, and its result."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.programs import Environment, Program

HEADER = """# Clients

The newest clients, as they come from their registries, against `baton up` with one prefill and one
decode worker and a scripted model (`tests/clients/scripted_model.py`). Each result is compared with
the exact expected one (`tests/clients/expected.py`). This page is written by

    make test-clients ARGS="--write-table docs/results/clients.md"

"""


@dataclass(frozen=True)
class CaseResult:
    program: Program
    case: str
    outcome: str


def render(results: Sequence[CaseResult]) -> str:
    """Return the table in Markdown, with one row for each client and API."""
    rows: dict[Program, list[CaseResult]] = defaultdict(list)
    for result in results:
        rows[result.program].append(result)
    lines = [
        "| client | language | version | API | what ran | result |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(program, found) for program, found in rows.items())]) + "\n"


def write(path: Path, results: Sequence[CaseResult]) -> None:
    path.write_text(HEADER + render(results))


def _row(program: Program, results: Sequence[CaseResult]) -> str:
    versions = {} if program.missing else program.versions()
    language = "Node.js" if program.environment is Environment.NODE else "Python"
    clients = ", ".join(f"`{package}`" for package in program.packages)
    cases = ", ".join(result.case for result in results)
    cells = (clients, language, ", ".join(versions.values()), program.api, cases, _summary(results))
    return f"| {' | '.join(cells)} |"


def _summary(results: Sequence[CaseResult]) -> str:
    if all(result.outcome == "skipped" for result in results):
        return "skipped"
    passed = sum(result.outcome == "passed" for result in results)
    others = [f"{each.outcome}: {each.case}" for each in results if each.outcome != "passed"]
    return "; ".join([f"{passed} of {len(results)} passed", *others])
