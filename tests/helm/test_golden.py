"""Every object of the values files, as it was last looked at.

    pytest tests/helm --rewrite

writes ``golden/`` anew; the diff is for review.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import Object, released

GOLDEN = Path(__file__).with_name("golden")
LOOKED_AT = ("demo", "gpu", "ray", "everything")


class Plain(yaml.CSafeDumper):
    """Texts of several lines as such, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.CSafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Plain.add_representer(str, _text)


def masked(each: Object) -> Object:
    """Without what is drawn anew each time."""
    if each["kind"] == "Secret" and "data" in each:
        return each | {"data": dict.fromkeys(each["data"], "…")}
    return each


def is_a_file(each: Object) -> bool:
    """A dashboard, or rules: ``test_watching`` compares them with their files."""
    is_dashboard = any(key.endswith(".json") for key in each.get("data", {}))
    return is_dashboard or each["kind"] == "PrometheusRule"


@pytest.mark.parametrize("scenario", LOOKED_AT)
def test_the_render_is_as_it_was(scenario: str, request: pytest.FixtureRequest) -> None:
    path = GOLDEN / f"{scenario}.yaml"
    objects = [masked(each) for each in released(scenario).objects if not is_a_file(each)]
    text = yaml.dump_all(objects, Dumper=Plain, sort_keys=False, allow_unicode=True, width=100)
    if request.config.getoption("--rewrite"):
        path.write_text(text)
    assert text == path.read_text(), "pytest tests/helm --rewrite, and look at the diff"


@pytest.mark.parametrize("scenario", LOOKED_AT)
def test_the_notes_are_as_they_were(scenario: str, request: pytest.FixtureRequest) -> None:
    path = GOLDEN / f"{scenario}.notes.txt"
    notes = released(scenario).notes
    if request.config.getoption("--rewrite"):
        path.write_text(notes)
    assert notes == path.read_text(), "pytest tests/helm --rewrite, and look at the diff"


def test_generated_secrets_are_long_and_different() -> None:
    first = released("demo").one("Secret", "demo-baton-secrets")["data"]
    second = released("ray").one("Secret", "demo-baton-secrets")["data"]
    drawn = [*first.values(), *second.values()]
    assert len(set(drawn)) == len(drawn) == 8
    assert all(len(text) == 64 for text in drawn)  # 48 letters and digits, in base64
