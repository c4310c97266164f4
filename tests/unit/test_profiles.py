"""Tests that the measured profiles in the repository determine the simulator's costs."""

import json
from pathlib import Path

import pytest

from simulator.cost_table import costs_from_table

PROFILES = sorted((Path(__file__).parents[2] / "simulator" / "profiles").glob("*.json"))


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_profile_is_fitted_within_seven_percent(profile: Path) -> None:
    costs, table = costs_from_table(profile), json.loads(profile.read_text())
    assert table["about"].startswith("measured on ")
    for row in table["prefill"]:
        tokens = row["new_tokens"]
        pairs = tokens * (row["cached_tokens"] + tokens / 2)
        terms = (1, tokens, pairs)
        fitted = sum(cost * n for cost, n in zip(_values(costs.prefill), terms, strict=True))
        assert fitted == pytest.approx(row["seconds"], rel=0.07)
    for row in table["decode"]:
        terms = (1, row["batch"], row["context_tokens"])
        fitted = sum(cost * n for cost, n in zip(_values(costs.decode), terms, strict=True))
        assert fitted == pytest.approx(row["seconds"], rel=0.07)


def _values(cost: object) -> tuple[float, float, float]:
    names = ("fixed_seconds", "per_token_seconds", "per_pair_seconds")
    if not hasattr(cost, names[1]):
        names = ("fixed_seconds", "per_request_seconds", "per_context_token_seconds")
    first, second, third = (float(getattr(cost, name)) for name in names)
    return first, second, third
