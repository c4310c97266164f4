"""Tests that docs/kubernetes.md and the chart's other pages name existing values, and that their
examples can be rendered."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART, Object, render
from tests.helm.test_schema import named_paths

ROOT = Path(__file__).parents[2]
PAGES = {
    path.name: path.read_text()
    for path in (
        ROOT / "docs/kubernetes.md", ROOT / "docs/operations.md", CHART / "templates/NOTES.txt",
        CHART / "values-gpu.yaml", CHART / "values-ray.yaml", CHART / "values-vllm.yaml",
    )
}  # fmt: skip
VALUES: Object = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
KNOWN = set(named_paths(SCHEMA, SCHEMA["definitions"]))

FILES = (".yaml", ".md", ".json", ".py", ".crt", ".key")

PATH = re.compile(r"(?:`|--set )([a-z]\w*(?:\.\w+)+)")
"""Matches the path of a value in inline code or after ``--set``."""


def plain(path: str) -> str:
    """Return the path under which the schema has this value: a pool's values are under
    ``poolDefaults``, and those of its model under ``model``."""
    path = path.replace("ROLE", "decode")
    path = re.sub(r"^pools\.\w+\.model\b", "model", path)
    return re.sub(r"^pools\.\w+", "poolDefaults", path)


def paths() -> list[tuple[str, str]]:
    return [
        (page, path)
        for page, text in PAGES.items()
        for path in sorted(set(PATH.findall(text)))
        if path.partition(".")[0] in VALUES and not path.endswith(FILES)
    ]


@pytest.mark.parametrize(("page", "path"), paths())
def test_values_named_in_docs_exist(page: str, path: str) -> None:
    found = plain(path)
    inside_settings = re.search(r"(^|\.)settings\.", found)
    assert inside_settings or found in KNOWN, f"{page} names {path}"


def test_value_names_are_found_in_docs() -> None:
    assert len(paths()) > 30


def blocks() -> list[Object]:
    found = re.findall(r"^```yaml\n(.*?)^```", PAGES["kubernetes.md"], re.MULTILINE | re.DOTALL)
    loaded = [yaml.safe_load(block) for block in found]
    return [block for block in loaded if set(block) <= set(VALUES)]


@pytest.mark.parametrize("block", blocks(), ids=lambda block: "+".join(block))
def test_examples_in_docs_render(block: Object) -> None:
    assert render(block).objects


def test_examples_are_found_in_docs() -> None:
    assert len(blocks()) == 8
