"""Runs every attack of ``tests/attacks`` briefly against one cluster: the outputs of another tenant
must stay exact, and no process may die. ``make neighbour`` measures time and memory, too."""

import pytest

from tests.attacks.collection import find_attacks
from tests.attacks.target import VIOLATION_PREFIX
from tests.neighbour import attack_from_subprocess, run_shared_cluster, summarize_streams

pytestmark = pytest.mark.timeout(300)
SECONDS = 1.0
SERVER_ERRORS = {"500", "501", "502", "504"}


def test_no_attack_changes_another_tenants_outputs() -> None:
    names = [attack.name for attack in find_attacks()]
    with run_shared_cluster() as place:
        before = place.snapshot()
        with place.run_streams() as answers:
            outcomes = attack_from_subprocess(names, place.target(SECONDS), SECONDS)
        assert place.snapshot().pids == before.pids
    result = summarize_streams(answers)
    assert result.is_exact, result.errors
    assert {name: each for name, each in outcomes.items() if any(map(is_wrong, each))} == {}


def is_wrong(outcome: str) -> bool:
    """Return whether an outcome is a server error, or a violation that the attack reports."""
    return outcome in SERVER_ERRORS or outcome.startswith(VIOLATION_PREFIX)
