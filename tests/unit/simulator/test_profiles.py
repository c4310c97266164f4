"""Tests that the measured profiles in the repository determine the simulator's costs."""

import json
from pathlib import Path

import pytest

from simulator.cost_table import CostTable, costs_from_table, relative_errors

PROFILES = sorted((Path(__file__).parents[3] / "simulator" / "profiles").glob("*.json"))
MAX_ERRORS = {"h100-80gb-qwen3-8b-bf16": 0.07}
"""The largest relative error of a fitted step, by profile; for the others MAX_BUSY_ERROR."""

MAX_BUSY_ERROR = 0.15
"""The same for profiles that were measured on a machine with other load."""


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_costs_explain_the_profile(profile: Path) -> None:
    text = profile.read_text()
    costs, table = costs_from_table(profile), CostTable.parse(text, profile.stem)
    assert json.loads(text)["about"].startswith("measured on ")
    most = MAX_ERRORS.get(profile.stem, MAX_BUSY_ERROR)
    for row in table.prefill:
        fitted = costs.prefill.seconds(row.new_tokens, row.cached_tokens)
        assert fitted == pytest.approx(row.seconds, rel=most)
    for row in table.decode:
        fitted = costs.decode.seconds(row.batch, row.context_tokens)
        assert fitted == pytest.approx(row.seconds, rel=most)
    if table.mixed:
        works, seconds = zip(*((row.work, row.seconds) for row in table.steps), strict=True)
        assert max(map(abs, relative_errors(costs.step, works, seconds))) < most
