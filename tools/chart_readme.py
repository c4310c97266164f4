"""Generate the tables of the chart's README from its values.

    python -m tools.chart_readme [--check]

In ``values.yaml``, ``# -- TEXT`` describes the key below it, and ``# @section -- TITLE`` begins a
table, as in helm-docs, except that a section lasts until the next one. Only the part of README.md
between the markers ``BEGIN`` and ``END`` is regenerated. With ``--check`` nothing is written, and
exit code 1 means that the README is stale.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[1] / "deploy/helm/baton"
VALUES, README = CHART / "values.yaml", CHART / "README.md"
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"

SECTION = re.compile(r"# @section -- (.+)")
DESCRIPTION = re.compile(r" *# -- (.+)")
KEY = re.compile(r"( *)([A-Za-z]\w*):(.*)")


@dataclass(frozen=True, slots=True)
class ValuesRow:
    path: str
    default: Any
    description: str


@dataclass(slots=True)
class Section:
    title: str
    rows: list[ValuesRow] = field(default_factory=list)


def sections(text: str) -> list[Section]:
    """Return the documented keys by section. Keys without a description (documented elsewhere) are
    left out."""
    values = yaml.safe_load(text)
    found: list[Section] = []
    for title, path, description in _marks(text):
        if title:
            found.append(Section(title))
        else:
            found[-1].rows.append(ValuesRow(path, _at(values, path), description))
    return found


def _marks(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the section titles, and the key paths with their descriptions, in the order of the
    lines."""
    folders: list[tuple[int, str]] = []
    description = ""
    for line in text.splitlines():
        if match := SECTION.fullmatch(line):
            yield match[1], "", ""
        elif match := DESCRIPTION.fullmatch(line):
            description = match[1]
        elif match := KEY.fullmatch(line):
            depth = len(match[1])
            folders = [each for each in folders if each[0] < depth] + [(depth, match[2])]
            if description:
                yield "", ".".join(name for _, name in folders), description
            description = ""


def _at(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values[name]
    return values


def tables(text: str) -> str:
    """Return the tables of all sections in Markdown."""
    return "\n".join(line for section in sections(text) for line in _table(section))


def _table(section: Section) -> Iterator[str]:
    yield f"### {section.title[0].upper()}{section.title[1:]}\n"
    yield "| value | default | |\n|---|---|---|"
    for row in section.rows:
        default = "" if row.default in ("", None) else f"`{_shown(row.default)}`"
        yield f"| `{row.path}` | {default} | {row.description.replace('|', chr(92) + '|')} |"
    yield ""


def _shown(value: Any) -> str:
    """Format a value as YAML on one line."""
    if isinstance(value, str):
        return value
    return json.dumps(value).replace("|", "\\|")


def filled(readme: str, values: str) -> str:
    """Return the README with its tables regenerated from ``values``."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables(values)}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; exit with 1 if stale")
    check: bool = parser.parse_args().check
    before = README.read_text()
    after = filled(before, VALUES.read_text())
    if check and before != after:
        print("the chart's README.md is stale; run python -m tools.chart_readme", file=sys.stderr)
        return 1
    if not check:
        README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
