"""Tests that the table of values in the chart's README is up to date."""

import yaml

from tests.helm.chart import CHART
from tools.chart_readme import README, VALUES, ValuesRow, filled, sections

SAMPLE = """\
# A file.

# @section -- One

# -- How many.
replicas: 2
router:
  # -- A map | with a line.
  labels: {a: "1"}
  quiet: 3

# @section -- Two
# -- Nothing.
name: ""
"""


def test_the_readme_is_up_to_date() -> None:
    text = README.read_text()
    assert text == filled(text, VALUES.read_text()), "python -m tools.chart_readme"


def test_documented_keys_are_found_with_their_sections() -> None:
    one, two = sections(SAMPLE)
    assert (one.title, two.title) == ("One", "Two")
    assert one.rows == [
        ValuesRow("replicas", 2, "How many."),
        ValuesRow("router.labels", {"a": "1"}, "A map | with a line."),
    ]
    assert two.rows == [ValuesRow("name", "", "Nothing.")]


def test_the_text_between_the_markers_is_replaced() -> None:
    readme = "before\n<!-- values: begin -->\nold\n<!-- values: end -->\nafter\n"
    text = filled(readme, SAMPLE)
    assert text.startswith("before\n<!-- values: begin -->\n\n### One\n")
    assert "old" not in text
    assert '| `router.labels` | `{"a": "1"}` | A map \\| with a line. |' in text
    assert text.endswith("<!-- values: end -->\nafter\n")
    assert filled(text, SAMPLE) == text


def test_every_top_level_value_is_documented() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    documented = {row.path.partition(".")[0] for section in sections(VALUES.read_text())
            for row in section.rows}  # fmt: skip
    assert set(values) - documented == {"probes"}
