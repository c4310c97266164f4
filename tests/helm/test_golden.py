"""Compares all objects that the chart renders with the golden files, for each values file.

    pytest tests/helm --rewrite

rewrites ``golden/``; review the changes with ``git diff``.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import Object, release_of

GOLDEN = Path(__file__).with_name("golden")
GOLDEN_SCENARIOS = (
    "demo", "gpu", "ray", "vllm", "vllm-pools", "everything",
)  # fmt: skip


class Plain(yaml.CSafeDumper):
    """A YAML dumper that writes multi-line strings as blocks, and never uses aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.CSafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Plain.add_representer(str, _text)


def masked(each: Object) -> Object:
    """Mask generated secrets, which differ in each render."""
    if each["kind"] == "Secret" and "data" in each:
        return each | {"data": dict.fromkeys(each["data"], "…")}
    return each


def wraps_a_file(each: Object) -> bool:
    """Return whether the object only wraps files of the chart: dashboards or alert rules. The
    golden files leave such objects out; ``test_monitoring`` compares them with the chart's
    files."""
    is_dashboard = any(key.endswith(".json") for key in each.get("data", {}))
    return is_dashboard or each["kind"] == "PrometheusRule"


@pytest.mark.parametrize("scenario", GOLDEN_SCENARIOS)
def test_rendered_objects_equal_the_golden_file(
    scenario: str, request: pytest.FixtureRequest
) -> None:
    path = GOLDEN / f"{scenario}.yaml"
    objects = [masked(each) for each in release_of(scenario).objects if not wraps_a_file(each)]
    text = yaml.dump_all(objects, Dumper=Plain, sort_keys=False, allow_unicode=True, width=100)
    if request.config.getoption("--rewrite"):
        path.write_text(text)
    assert text == path.read_text(), "pytest tests/helm --rewrite, and look at the diff"


@pytest.mark.parametrize("scenario", GOLDEN_SCENARIOS)
def test_notes_equal_the_golden_file(scenario: str, request: pytest.FixtureRequest) -> None:
    path = GOLDEN / f"{scenario}.notes.txt"
    notes = release_of(scenario).notes
    if request.config.getoption("--rewrite"):
        path.write_text(notes)
    assert notes == path.read_text(), "pytest tests/helm --rewrite, and look at the diff"


def test_generated_secrets_are_long_and_different() -> None:
    first = release_of("demo").one("Secret", "demo-baton-secrets")["data"]
    second = release_of("ray").one("Secret", "demo-baton-secrets")["data"]
    drawn = [*first.values(), *second.values()]
    assert len(set(drawn)) == len(drawn) == 8
    assert all(len(text) == 64 for text in drawn)  # 48 letters and digits, in base64
