"""Tests that the files and classes that the Markdown documents name exist, and that the documents'
links to other files work."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("README.md")]
)
HISTORY = {"CHANGELOG.md"}
"""Documents that may name files and classes that no longer exist."""

PACKAGES = (
    "baton", "router", "conductor", "prefill_worker", "decode_worker", "kvstore", "simulator",
    "orchestrator", "load_generator", "command_line", "testkit", "tools", "benchmarks", "tests",
    "docs", "deploy", "loadtest", "proto",
)  # fmt: skip
FILE = re.compile(rf"`((?:{'|'.join(PACKAGES)})/[\w./-]*)`")
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?")
CLASSES_IN_FILE = re.compile(r"((?:`[A-Z]\w+(?:\.\w+)?`,? ?)+)\| ((?:`[\w/.]+\.py`,? ?)+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_links_exist(document: Path) -> None:
    text = document.read_text()
    broken = [link for link, _ in LINK.findall(text) if not _exists(document.parent, link)]
    missing = [name for name in FILE.findall(text) if not (ROOT / name).exists()]
    if document.name in HISTORY:
        missing = []
    assert (broken, missing) == ([], [])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_classes_in_tables_are_in_the_files_beside_them(document: Path) -> None:
    if document.name in HISTORY:
        return
    missing = []
    for names, files in CLASSES_IN_FILE.findall(document.read_text()):
        text = "".join((ROOT / name).read_text() for name in re.findall(r"`([^`]+)`", files))
        for name in re.findall(r"`([A-Z]\w+)", names):
            if not re.search(rf"^(?:class |def )?{name}\b", text, re.MULTILINE):
                missing.append(name)
    assert missing == []


def test_figures_of_the_readme_are_those_of_the_results() -> None:
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| measured on") : text.index("What falls short")].strip()
    for row in table.splitlines()[2:]:
        _, ours, others, page = row.strip("| ").rsplit("|", 3)
        [(link, _)] = LINK.findall(page)
        results = (ROOT / link).read_text()
        missing = set(FIGURE.findall(ours + others)) - set(FIGURE.findall(results))
        assert not missing, (link, missing)


def _exists(folder: Path, link: str) -> bool:
    return link.startswith(("http:", "https:", "mailto:")) or (folder / link).exists()
